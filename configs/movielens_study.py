"""The comparison of next-item models on MovieLens-1M at ε = 5, 8 and 10 (Ding et al., Table 2).

A run takes few, large steps, and 20 items of a user, all of which predict: some minutes on a core.
"""

import ml_collections

from configs import movielens


def get_config() -> ml_collections.ConfigDict:
    """The settings of `configs/movielens.py`, smaller, and the study's own."""
    config = movielens.get_config()
    config.data.length, config.data.predicted = 20, 20
    config.model.dropout = 0.0
    config.training.update({"epochs": 10, "microbatch_size": 0, "score_every": 2})
    config.study = ml_collections.ConfigDict(
        {
            # each group of models is finished before the next begins
            "models": (("re_attention", "vanilla"), ("without_sharing", "gru", "lstm")),
            "epsilons": (5.0, 8.0, 10.0),
            "seeds": (0, 1, 2),
            "batch_sizes": (1510,),
            "learning_rates": (0.01, 0.03),
            "grid_epsilon": 8.0,
            "results": "docs/results/sequence.jsonl",
            "page": "docs/results/sequence.md",
            "maps": "runs/movielens_study",  # what is drawn of users' own items
        }
    )
    return config
