"""Reads a layer's pre-activation, by replacing its `activation` while its own call runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf


@contextlib.contextmanager
def watched_preactivation(
    layer: keras.layers.Layer, watch: Callable[[tf.Tensor], tf.Tensor]
) -> Iterator[None]:
    """Passes each pre-activation of `layer` to `watch`, and uses what it returns instead.

    A layer without an activation calls `watch` too.
    """
    original = layer.activation

    def activation(preactivation: tf.Tensor) -> Any:
        watched = watch(preactivation)
        return watched if original is None else original(watched)

    layer.activation = activation
    try:
        yield
    finally:
        layer.activation = original


def of_broadcast(cotangents: tf.Tensor, shape: Any) -> tf.Tensor:
    """Per-example gradients of a variable that was broadcast against `[batch, ...]` and added."""
    rank = cotangents.shape.rank
    kept = {rank - len(shape) + axis for axis, size in enumerate(shape) if size != 1}
    summed = tf.reduce_sum(cotangents, axis=[a for a in range(1, rank) if a not in kept])
    return tf.reshape(summed, [-1, *shape])
