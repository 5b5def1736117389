"""Private training where Keras' own `fit` does not work: on several workers, and on TPUs.

Under `MirroredStrategy`, `model.fit` works.
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
