"""Criteo day by day: 18 days train, one at a time, and the days behind them evaluate.

Of Criteo-1TB, with `--config.data.days='FOLDER/day_*.gz'` and `--config.data.reading=drawn`.
"""

import ml_collections

from configs import common
from pipelines.criteo.schema import TABLE3_VOCABULARIES


def get_config() -> ml_collections.ConfigDict:
    """DP-AdaFEST at ε = 1, a streaming period of one day."""
    config = ml_collections.ConfigDict()
    config.method = "dp_adafest"  # or another of pipelines.methods
    config.period = 1  # days between two updates of the model
    config.seed = 0  # of the initial weights
    config.hidden = (598, 598, 598, 598)  # widths of the model's ReLU layers
    config.directory = "runs/criteo_time_series"
    config.export = ""  # a folder for exports after each period: whole, then what it changed
    config.checkpoint_seconds = 600.0
    config.verbose = 0
    config.data = ml_collections.ConfigDict(
        {
            "days": "",  # a pattern of files with a number each, such as 'criteo/day_*.gz'
            "train_days": 18,
            "reading": "records",  # at random; or drawn: batches drawn before, for terabytes
            "beam": (),  # options of Apache Beam, for drawn
            "vocabularies": TABLE3_VOCABULARIES,
        }
    )
    config.training = ml_collections.ConfigDict({"batch_size": 4096, "epochs": 1.0})
    config.optimizer = ml_collections.ConfigDict(
        {
            "name": "Adam",
            "options": {"learning_rate": 0.01},
            "decays": True,  # to 0 along a line over all periods: a rate that stays hardly learns
            "walk": 0.2,  # as in configs/criteo_sample.py
        }
    )
    config.privacy = ml_collections.ConfigDict(
        {
            "epsilon": 1.0,
            "delta": 0.0,  # 0: 1 / number of training rows of all days
            "clip_norm": 1.0,
            "clip_quantile": 0.95,  # as in configs/criteo_sample.py
        }
    )
    config.adafest = common.adafest()
    config.selection = ml_collections.ConfigDict(  # of dp_fest and dp_adafest_plus
        {"frequencies": "running", "rows": 3000, "share": 0.01}
    )
    config.evaluation = ml_collections.ConfigDict({"rows_per_day": 1_000_000})
    return config
