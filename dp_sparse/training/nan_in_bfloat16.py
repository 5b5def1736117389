"""Where products of this machine let NaN through to other examples, no example may hold any."""

import keras
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import BadExampleError, require
from dp_sparse.sampling import Examples

_NOT_FINITE = (
    "Expected finite inputs and labels under bfloat16 on this machine, got NaN or infinity in {} "
    "examples: its products (oneDNN) would pass it on to other examples.\n"
    "Replace these values, set TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported, or train in "
    "float32."
)


def refuse_nan(model: keras.Model, examples: Examples) -> Examples:
    """The examples, which the step takes once all floats of those that are there are finite.

    Raises:
        BadExampleError: At run time, where one is not and the model computes in bfloat16 on a
            machine whose products read behind a row.
    """
    if not clipping.lets_nan_through(model):
        return examples
    present = examples.present > 0
    lost = tf.zeros_like(present)
    for leaf in tf.nest.flatten((examples.x, examples.y)):
        if leaf.dtype.is_floating:
            flat = tf.reshape(leaf, [tf.shape(leaf)[0], -1])
            lost |= present & tf.reduce_any(~tf.math.is_finite(flat), axis=1)
    count = tf.math.count_nonzero(lost, dtype=tf.int32)
    with tf.control_dependencies([require(count < 1, BadExampleError, _NOT_FINITE, count)]):
        return tf.nest.map_structure(tf.identity, examples)
