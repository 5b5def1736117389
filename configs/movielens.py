"""MovieLens-1M at ε = 8, δ = 1/users: a Transformer with Re-Attention, 100 epochs.

The last 50 of a user's items, all of whose positions predict: at 200 positions the loss over all
items would cost four times as much. Noise has a part in every weight, so fewer weights learn more:
some 360 items that 200 users or more have, by noisy counts, and a width of 16. The other items are
never found. Other files of SASRec's format, such as Amazon's, need their own `data.num_items` and
`data.filter_items` (0 keeps all items).
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
    """The defaults of the recommendation pipeline."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of the initial weights
    config.data = ml_collections.ConfigDict(
        {
            "path": "",  # `user item` in each line, in the order of time for each user
            "tfds": "",  # or ratings of tensorflow-datasets, such as movielens/1m-ratings
            "directory": "",  # of tensorflow-datasets; by default its own
            "quarantine": False,  # whether lines that are not two integers are left out and counted
            "num_items": 3416,  # public: items are numbered from 1 on
            "item_list": "",  # or a public file with an item in each line
            "min_interactions": 5,  # users with fewer are left out
            "filter_items": 200,  # items with a smaller noisy count are left out; 0 for none
            "length": 50,  # the last items of a user
            "predicted": 50,  # the last positions that predict the item after them
            "held_out": "test",  # or "validation", which does not look at the last item
        }
    )
    config.model = common.sequence_model(width=16, heads=1, blocks=2, dropout=0.0)
    config.training = ml_collections.ConfigDict(
        {"epochs": 100, "batch_size": 512, "microbatch_size": 256, "score_every": 10}
    )
    config.optimizer = ml_collections.ConfigDict(
        {"learning_rate": 1e-2, "weight_decay": 1e-5, "warm_up": 0.2}
    )
    config.privacy = common.sequence_privacy()
    config.report = ml_collections.ConfigDict({"directory": "runs/movielens", "verbose": 0})
    return config
