"""Private training of models whose embedding tables are in a TPU embedding layer.

Such layers (`tf.tpu.experimental.embedding`, TensorFlow Recommenders' `TPUEmbedding`, keras-rs'
`DistributedEmbedding`) update their tables in the backward pass of a lookup. So the lookup is given
private gradients of its activations. All three also run off TPU, with the same numbers.
"""

from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables
from dp_sparse.distribution.embedding_layers.serving import model_inputs, serving_layer
from dp_sparse.distribution.embedding_layers.tfrs_ranking import RankingModel
from dp_sparse.distribution.embedding_layers.training_loop import train_tables

__all__ = ["PrivateTables", "RankingModel", "model_inputs", "serving_layer", "train_tables"]
