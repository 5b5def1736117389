"""LayerNormalization: scale and offset.

Their per-example gradients are sums over the positions of an example. Gradients are summed over
positions before anything is squared.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Direct, Use


def call_layer_normalization(
    layer: keras.layers.LayerNormalization, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs the layer's own call and records the uses of scale and offset.

    γ's gradient needs the normalised input, taken again from the same statistics.
    """
    outputs = call(inputs)

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        uses: list[tuple[keras.Variable, Use]] = []
        dz = cotangents[0]
        if tap.trains(layer.gamma):
            normalised = _normalised(tf.cast(inputs, tf.float32), layer)
            uses.append((layer.gamma, Direct(_per_example(dz * normalised, layer))))
        if tap.trains(layer.beta):
            uses.append((layer.beta, Direct(_per_example(dz, layer))))
        return uses

    tap.watch([outputs], uses_of)
    return outputs


def _normalised(inputs: tf.Tensor, layer: keras.layers.LayerNormalization) -> tf.Tensor:
    return keras.ops.layer_normalization(
        inputs, None, None, layer.axis, layer.epsilon, rms_scaling=layer.rms_scaling
    )


def _per_example(values: tf.Tensor, layer: keras.layers.LayerNormalization) -> tf.Tensor:
    """Sums `[batch, ...]` over every axis that is neither the batch nor normalised."""
    kept = {axis % values.shape.rank for axis in layer.axis}
    return tf.reduce_sum(values, axis=[a for a in range(1, values.shape.rank) if a not in kept])
