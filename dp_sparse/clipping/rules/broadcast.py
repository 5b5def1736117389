"""Variables that are broadcast against a layer's output."""

from typing import Any

import tensorflow as tf


def of_broadcast(cotangents: tf.Tensor, shape: Any) -> tf.Tensor:
    """Per-example gradients of a variable that was broadcast against `[batch, ...]` and added."""
    rank = cotangents.shape.rank
    kept = {rank - len(shape) + axis for axis, size in enumerate(shape) if size != 1}
    summed = tf.reduce_sum(cotangents, axis=[a for a in range(1, rank) if a not in kept])
    return tf.reshape(summed, [-1, *shape])
