"""Private training where the embedding tables are those of a TPU embedding layer.

Such layers (`tf.tpu.experimental.embedding`, TensorFlow Recommenders' `TPUEmbedding`, keras-rs'
`DistributedEmbedding`) update their tables in the backward pass of a lookup, so privacy goes in as
the gradients of its activations. All three run off TPU, too, with the same numbers.
"""

from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables
from dp_sparse.distribution.embedding_layers.serving import model_inputs, serving_layer
from dp_sparse.distribution.embedding_layers.tfrs_ranking import RankingModel
from dp_sparse.distribution.embedding_layers.training_loop import train_tables

__all__ = ["PrivateTables", "RankingModel", "model_inputs", "serving_layer", "train_tables"]
