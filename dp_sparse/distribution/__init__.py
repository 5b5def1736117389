"""Private training on several devices, where Keras' own `fit` does not reach.

`MirroredStrategy` needs nothing from here: `model.fit` trains on it.
"""

from dp_sparse.distribution.embedding_layers import (
    PrivateTables,
    RankingModel,
    model_inputs,
    serving_layer,
    train_tables,
)
from dp_sparse.distribution.multi_worker import train

__all__ = [
    "PrivateTables",
    "RankingModel",
    "model_inputs",
    "serving_layer",
    "train",
    "train_tables",
]
