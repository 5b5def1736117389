"""PReLU: `z = max(x, 0) − α·max(−x, 0)`, with α shared over some axes."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.rules.activation import of_broadcast
from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Direct, Use


def call_prelu(
    layer: keras.layers.PReLU, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs the layer's own call and records the use of α."""
    outputs = call(inputs)

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        terms = -cotangents[0] * tf.nn.relu(-tf.cast(inputs, tf.float32))
        return [(layer.alpha, Direct(of_broadcast(terms, layer.alpha.shape)))]

    tap.watch([outputs], uses_of)
    return outputs
