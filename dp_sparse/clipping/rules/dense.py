"""Dense: `z = x·W + b`, with LoRA `z = x·(W + s·A·B) + b`."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.rules.activation import watched_preactivation
from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Direct, Product, Use


def call_dense(
    layer: keras.layers.Dense, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor, **kwargs: Any
) -> tf.Tensor:
    """Runs a Dense call and records its product and its bias.

    Positions are all axes but the first and last.
    """

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        uses: list[tuple[keras.Variable, Use]] = []
        x, dz = _by_position(tf.cast(inputs, tf.float32)), _by_position(cotangents[0])
        if tap.trains(layer._kernel):
            uses.append((layer._kernel, Product(x, dz)))
        if tap.trains(layer.bias):
            uses.append((layer.bias, Direct(_over_positions(dz))))
        return uses + (_lora_uses(layer, tap, x, dz) if layer.lora_enabled else [])

    def watch(preactivation: tf.Tensor) -> tf.Tensor:
        tap.watch([preactivation], uses_of)
        return preactivation

    with watched_preactivation(layer, watch):
        return call(inputs, **kwargs)


def _lora_uses(
    layer: keras.layers.Dense, tap: Tap, x: tf.Tensor, dz: tf.Tensor
) -> list[tuple[keras.Variable, Use]]:
    scale = layer.lora_alpha / layer.lora_rank
    a, b = (tf.cast(v.value, tf.float32) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    uses: list[tuple[keras.Variable, Use]] = []
    if tap.trains(layer.lora_kernel_a):
        uses.append((layer.lora_kernel_a, Product(x, tf.einsum("...n,rn->...r", scale * dz, b))))
    if tap.trains(layer.lora_kernel_b):
        uses.append((layer.lora_kernel_b, Product(tf.einsum("...d,dr->...r", scale * x, a), dz)))
    return uses


def _by_position(values: tf.Tensor) -> tf.Tensor:
    """`[batch, ..., width]` as `[batch, positions, width]`; `[batch, width]` stays as it is."""
    if values.shape.rank == 2:
        return values
    inner = values.shape[1:-1]
    positions = inner.num_elements() if inner.is_fully_defined() else -1
    return tf.reshape(values, [tf.shape(values)[0], positions, values.shape[-1]])


def _over_positions(values: tf.Tensor) -> tf.Tensor:
    return values if values.shape.rank == 2 else tf.reduce_sum(values, axis=1)
