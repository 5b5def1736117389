"""The effect of σ1/σ2 and τ, each and both, at ε = 1 on a sample of Criteo-Kaggle.

Figures 7 and 9 of Ghazi et al., NeurIPS 2023.
"""

import ml_collections

from configs.criteo_kaggle import tradeoff

RATIOS = (0.1, 1.0, 10.0)
THRESHOLDS = (5.0, 20.0, 50.0, 100.0)


def get_config() -> ml_collections.ConfigDict:
    """The sweep; 0.5 to 1 minute a point on one core."""
    config = tradeoff.get_config()
    config.directory = "runs/criteo_kaggle_hyperparameters"
    config.kind = "hyperparameters"
    config.points = tuple(
        {
            "name": f"r{ratio:g}_t{threshold:g}",
            "seed": 0,
            "changes": tradeoff.adafest("dp_adafest", ratio, threshold),
        }
        for ratio in RATIOS
        for threshold in THRESHOLDS
    )
    return config
