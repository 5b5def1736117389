"""DP-AdaFEST at ε = 1 on made-up rows with Table 3's vocabularies, at a reduction of 10⁴ and more.

`python -m pipelines.criteo.generate --rows=2000000 --out=FILE` makes them, and
`python -m pipelines.criteo` trains on them with this config.
"""

import ml_collections

from configs import criteo_sample


def get_config() -> ml_collections.ConfigDict:
    """One pass; a threshold that far fewer than 4 rows a step reach on noise alone."""
    config = criteo_sample.get_config()
    config.training.epochs = 1.0
    config.training.evaluations = 1
    config.adafest.threshold = 50.0
    config.report.directory = "runs/criteo_generated"
    config.report.points = 4
    return config
