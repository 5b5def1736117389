"""Next-item models on Amazon's video games at ε = 5, 8 and 10 (Ding et al., Table 3 and Figure 9).

Users have few items, and five times as many users train as on MovieLens: shorter sequences, larger
batches, fewer epochs. The paper's models without a tied table and its LSTM are left out.
"""

import ml_collections

from configs import movielens_study


def get_config() -> ml_collections.ConfigDict:
    """The study of `configs/movielens_study.py` on other ratings."""
    config = movielens_study.get_config()
    config.data.update({"num_items": 23_715, "filter_items": 50, "length": 20, "predicted": 20})
    config.training.update({"epochs": 20, "batch_size": 2048, "score_every": 5})
    config.study.update(
        {
            "data": "amazon",
            "models": (("re_attention", "vanilla", "gru"),),
            "batch_sizes": (2048,),
            "learning_rates": (0.01, 0.02),
            "in_grid_alone": (),
            "seeds": (0, 1, 2),
            "results": "docs/results/amazon.jsonl",
            "page": "docs/results/amazon.md",
            "maps": "runs/amazon_study",
        }
    )
    return config
