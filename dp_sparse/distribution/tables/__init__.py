"""Private training where the embedding tables are those of a TPU embedding layer.

Such layers (`tf.tpu.experimental.embedding`, TensorFlow Recommenders' `TPUEmbedding`, keras-rs'
`DistributedEmbedding`) update their tables in the backward pass of a lookup, so privacy goes in as
the gradients of its activations. All three run off TPU, too, with the same numbers.
"""

from dp_sparse.distribution.tables.features import PrivateTables
from dp_sparse.distribution.tables.loop import train_tables
from dp_sparse.distribution.tables.recommenders import RankingModel
from dp_sparse.distribution.tables.serving import model_inputs, serving_layer

__all__ = ["PrivateTables", "RankingModel", "model_inputs", "serving_layer", "train_tables"]
