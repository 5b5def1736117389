"""Retrieval of a user's next film from the ten before it, on MovieLens-1M."""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
    """One run of `pipelines.movielens.retrieval`."""
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.method = "dp_adafest"  # or dp_sgd, non_private
    config.data = ml_collections.ConfigDict({"path": "", "users": 1.0, "history": 10})
    config.model = ml_collections.ConfigDict(
        {
            "width": 32,
            "loss": "sampled",  # or in_batch, without privacy alone; or full
            "negatives": 1024,
        }
    )
    config.privacy = ml_collections.ConfigDict({"epsilon": 8.0, "delta": 0.0, "clip_norm": 1.0})
    options = {"learning_rate": 0.005}
    config.optimizer = ml_collections.ConfigDict({"name": "Adam", "options": options})
    config.adafest = common.adafest()
    config.training = ml_collections.ConfigDict({"batch_size": 4096, "epochs": 2.0})
    return config
