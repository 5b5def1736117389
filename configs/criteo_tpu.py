"""Criteo pCTR with its tables in an embedding layer, as TPUs have them.

Such layers take SGD and Adagrad alone, and a clip norm that stays.
"""

import ml_collections

from configs import criteo_sample


def get_config() -> ml_collections.ConfigDict:
    """`criteo_sample` with what an embedding layer takes."""
    config = criteo_sample.get_config()
    config.tables = "layer"
    config.optimizer.name = "Adagrad"
    # Noisy mean gradients are small: with Keras' 0.1 the accumulator would never grow.
    config.optimizer.options = {"learning_rate": 0.05, "initial_accumulator_value": 1e-4}
    config.optimizer.decays, config.privacy.clip_quantile = False, 0.0
    return config
