"""Normalisation layers: per-feature scale and offset.

Their per-example gradients are sums over the positions of an example, and are summed before they
are squared. UnitNormalization has no variables and needs no rule.

PReLU is here, too: `z = max(x, 0) − α·max(−x, 0)`, with α shared over some axes.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import Explicit, GradientTerm
from dp_sparse.clipping.rules.activation import of_broadcast
from dp_sparse.clipping.tap import Tap


def call_layer_normalization(
    layer: keras.layers.LayerNormalization, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs the layer's own call and records the uses of scale and offset."""

    def normalised(x: tf.Tensor) -> tf.Tensor:
        return keras.ops.layer_normalization(
            x, None, None, layer.axis, layer.epsilon, rms_scaling=layer.rms_scaling
        )

    return _scaled(call, tap, inputs, normalised, layer.gamma, layer.beta, layer.axis)


def call_rms_normalization(
    layer: keras.layers.RMSNormalization, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs the layer's own call and records the use of the scale."""

    def normalised(x: tf.Tensor) -> tf.Tensor:
        return keras.ops.rms_normalization(x, None, layer.axis, layer.epsilon)

    return _scaled(call, tap, inputs, normalised, layer.scale, None, layer.axis)


def call_group_normalization(
    layer: keras.layers.GroupNormalization, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs the layer's own call and records the uses of scale and offset."""

    def normalised(x: tf.Tensor) -> tf.Tensor:
        grouped = layer._reshape_into_groups(x)
        channels = layer.axis % x.shape.rank  # the axis of groups; their channels come after it
        inner = [axis for axis in range(1, grouped.shape.rank) if axis != channels]
        mean, variance = tf.nn.moments(grouped, inner, keepdims=True)
        return tf.reshape((grouped - mean) * tf.math.rsqrt(variance + layer.epsilon), tf.shape(x))

    gamma = layer.gamma if layer.scale else None
    beta = layer.beta if layer.center else None
    return _scaled(call, tap, inputs, normalised, gamma, beta, [layer.axis])


def _scaled(
    call: Callable[..., Any],
    tap: Tap,
    inputs: tf.Tensor,
    normalised: Callable[[tf.Tensor], tf.Tensor],
    scale: keras.Variable | None,
    offset: keras.Variable | None,
    axes: Any,
) -> tf.Tensor:
    """Records `z = scale · n(x) + offset`; n(x) is computed again from the inputs, in float32."""
    outputs = call(inputs)
    given = [axes] if isinstance(axes, int) else axes
    kept = {axis % outputs.shape.rank for axis in given}
    summed = [axis for axis in range(1, outputs.shape.rank) if axis not in kept]

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        terms: list[tuple[keras.Variable, GradientTerm]] = []
        dz = cotangents[0]
        if tap.trains(scale):
            products = dz * normalised(tf.cast(inputs, tf.float32))
            terms.append((scale, Explicit(tf.reduce_sum(products, axis=summed))))
        if tap.trains(offset):
            terms.append((offset, Explicit(tf.reduce_sum(dz, axis=summed))))
        return terms

    tap.watch([outputs], terms_of)
    return outputs


def call_prelu(
    layer: keras.layers.PReLU, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs the layer's own call and records the use of α."""
    outputs = call(inputs)

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        products = -cotangents[0] * tf.nn.relu(-tf.cast(inputs, tf.float32))
        return [(layer.alpha, Explicit(of_broadcast(products, layer.alpha.shape)))]

    tap.watch([outputs], terms_of)
    return outputs
