"""A small run of `configs/movielens.py`, to try it: 20 items of a user, ten epochs."""

import ml_collections

from configs import movielens


def get_config() -> ml_collections.ConfigDict:
    """Smaller sizes, the same job."""
    config = movielens.get_config()
    config.data.length, config.data.predicted = 20, 20
    config.data.filter_items = 100
    config.training.epochs, config.training.score_every = 10, 5
    config.optimizer.learning_rate = 2e-2
    config.report.directory = "runs/movielens_small"
    return config
