"""A small run of `configs/shakespeare.py`, to try it: two blocks of width 32, ten epochs."""

import ml_collections

from configs import shakespeare


def get_config() -> ml_collections.ConfigDict:
    """Smaller sizes, the same job."""
    config = shakespeare.get_config()
    config.data.length = 64
    config.model.update({"width": 32, "heads": 2, "blocks": 2, "dropout": 0.0})
    config.training.update({"epochs": 10, "batch_size": 1024, "score_every": 5})
    config.optimizer.learning_rate = 1e-2
    config.report.directory = "runs/shakespeare_small"
    return config
