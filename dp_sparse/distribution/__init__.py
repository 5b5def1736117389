"""Private training on several devices, where Keras' own `fit` does not reach.

`MirroredStrategy` needs nothing from here: `model.fit` trains on it.
"""

from dp_sparse.distribution.loop import train
from dp_sparse.distribution.tables import (
    PrivateTables,
    RankingModel,
    model_inputs,
    serving_layer,
    train_tables,
)

__all__ = [
    "PrivateTables",
    "RankingModel",
    "model_inputs",
    "serving_layer",
    "train",
    "train_tables",
]
