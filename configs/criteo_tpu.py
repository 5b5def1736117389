"""Criteo pCTR with its tables in an embedding layer, as TPUs have them.

Such layers take SGD and Adagrad alone, and a clip norm that stays.
"""

import ml_collections

from configs import common, criteo_sample


def get_config() -> ml_collections.ConfigDict:
    """`criteo_sample` with what an embedding layer takes."""
    config = criteo_sample.get_config()
    config.tables = "layer"
    config.optimizer.update({**common.adagrad(), "decays": False, "walk": 0.0})
    config.privacy.clip_quantile = 0.0
    return config
