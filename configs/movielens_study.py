"""The comparison of next-item models on MovieLens-1M at ε = 5, 8 and 10 (Ding et al., Table 2).

A run is that of `configs/movielens.py`, 100 epochs of the last 50 items: docs/results/sequence.md
has the seconds of those of the grid.
"""

import ml_collections

from configs import movielens


def get_config() -> ml_collections.ConfigDict:
    """The settings of `configs/movielens.py`, and the study's own."""
    config = movielens.get_config()
    config.study = ml_collections.ConfigDict(
        {
            "data": "movielens",  # of pipelines.movielens.study_page
            # each group of models is finished before the next begins
            "models": (("re_attention", "vanilla"), ("without_sharing", "gru", "lstm")),
            "epsilons": (5.0, 8.0, 10.0),
            "seeds": (0, 1, 2),
            "batch_sizes": (512,),
            "learning_rates": (0.0025, 0.005, 0.01, 0.02),
            "in_grid_alone": (
                ("without_sharing_half_width", 0.005),
                ("without_sharing_half_width", 0.01),
                ("gru_all_items", 0.02),
                ("vanilla_all_items", 0.005),
                ("gru_width_64", 0.02),
                ("vanilla_width_64", 0.005),
            ),
            "grid_epsilon": 8.0,
            "same": 0.05,  # points of NDCG@10, less than what seeds differ by
            "results": "docs/results/sequence.jsonl",
            "page": "docs/results/sequence.md",
            "maps": "runs/movielens_study",  # what is drawn of users' own items
        }
    )
    return config
