"""Convolutions: `z = x ∗ W + b`, plain, grouped, depthwise, separable and transposed.

A kernel whose per-example gradients fit a budget is recorded by these gradients: computing them
costs what an ordinary weight gradient costs (`convolution_form`), and they are read twice more, for
the norms and for the sum. A larger kernel is recorded as a bilinear form: norms block by block,
then the weight gradient of the scaled cotangents, without any per-example gradient.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from dp_sparse.clipping.rules.activation import watched_preactivation
from dp_sparse.clipping.rules.convolution_form import (
    Convolution,
    TransposedConvolution,
    by_position,
)
from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Direct, Linear, Use, squares

DIRECT_BUDGET = 2**25  # bytes of one kernel's per-example gradients, of the largest batch
Form = Convolution | TransposedConvolution


@dataclasses.dataclass(frozen=True)
class KernelGradients:
    """The per-example gradients of a small kernel, in the blocks in which they were computed.

    Attributes:
        parts: g_i by block of the kernel, each float32 `[batch, ...]`.
        form: The convolution that the blocks belong to.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("parts",)
    holds_gradients: ClassVar[bool] = True
    parts: tuple[tf.Tensor, ...]
    form: Form

    def squared_norms(self) -> tf.Tensor:
        """Σ over the blocks of ‖g_i on the block‖²."""
        return tf.add_n([squares(part) for part in self.parts])

    def joined_with(self, others: Sequence["KernelGradients"]) -> "KernelGradients":
        """The sums of all calls' gradients."""
        calls = zip(self.parts, *(other.parts for other in others), strict=True)
        return KernelGradients(tuple(tf.add_n(parts) for parts in calls), self.form)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, float32 of the shape of the kernel."""
        return self.form.assembled([_weighted_sum(factors, part) for part in self.parts])


def call_convolution(
    layer: Any, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs Conv1D, Conv2D or Conv3D and records its kernel and its bias."""
    form = _geometry(layer, layer.kernel.shape, layer.groups)
    use_of = functools.partial(_kernel_use, tap, layer.kernel, form)
    return _recorded(layer, call, tap, inputs, layer.kernel, use_of)


def call_transposed_convolution(
    layer: Any, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs Conv1DTranspose, Conv2DTranspose or Conv3DTranspose; records its kernel and its bias."""
    form = TransposedConvolution(_geometry(layer, layer.kernel.shape))
    use_of = functools.partial(_kernel_use, tap, layer.kernel, form)
    return _recorded(layer, call, tap, inputs, layer.kernel, use_of)


def call_depthwise_convolution(
    layer: Any, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs DepthwiseConv1D or DepthwiseConv2D and records its kernel and its bias."""
    use_of = functools.partial(_depthwise_use, layer, layer.kernel)
    return _recorded(layer, call, tap, inputs, layer.kernel, use_of)


def call_separable_convolution(
    layer: Any, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs the two steps of SeparableConv1D or SeparableConv2D; records both kernels and the bias.

    The layer's own call fuses them and hides the tensor between them, whose cotangent is needed.
    """
    del call
    depthwise, pointwise = layer.depthwise_kernel, layer.pointwise_kernel
    between = keras.ops.depthwise_conv(
        inputs, depthwise, layer.strides, layer.padding, layer.data_format, layer.dilation_rate
    )

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        x, dz = _channels_last(inputs, layer), _channels_last(cotangents[0], layer)
        return [(depthwise, _depthwise_use(layer, depthwise, x, dz))]

    if tap.trains(depthwise):
        tap.watch([between], uses_of)

    def second_step(between: tf.Tensor) -> tf.Tensor:
        outputs = keras.ops.conv(between, pointwise, 1, "valid", layer.data_format)
        return layer.activation(_biased(outputs, layer))

    ones = (1,) * layer.rank
    form = Convolution(tuple(pointwise.shape), ones, ones, "valid")
    use_of = functools.partial(_kernel_use, tap, pointwise, form)
    return _recorded(layer, second_step, tap, between, pointwise, use_of)


def _recorded(
    layer: Any,
    call: Callable[..., Any],
    tap: Tap,
    inputs: tf.Tensor,
    kernel: keras.Variable,
    use_of: Callable[[tf.Tensor, tf.Tensor], Use],
) -> tf.Tensor:
    """Runs `call`; its pre-activation's cotangent gives `kernel`'s use and the bias."""

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        uses: list[tuple[keras.Variable, Use]] = []
        if tap.trains(kernel):
            x, dz = _channels_last(inputs, layer), _channels_last(cotangents[0], layer)
            uses.append((kernel, use_of(x, dz)))
        if tap.trains(layer.bias):
            uses.append((layer.bias, Direct(_bias_gradients(cotangents[0], layer))))
        return uses

    def watch(preactivation: tf.Tensor) -> tf.Tensor:
        tap.watch([preactivation], uses_of)
        return preactivation

    with watched_preactivation(layer, watch):
        return call(inputs)


def _kernel_use(tap: Tap, kernel: keras.Variable, form: Form, x: tf.Tensor, dz: tf.Tensor) -> Use:
    """The use of a kernel, of one kind for all its calls in a step, so that they can be joined."""
    if 4 * tap.batch_capacity * math.prod(kernel.shape) <= DIRECT_BUDGET:
        return KernelGradients(form.example_gradients(x, dz), form)
    return Linear((x,), (dz,), form)


def _depthwise_use(layer: Any, kernel: keras.Variable, x: tf.Tensor, dz: tf.Tensor) -> Use:
    """Per-example gradients, smaller than the outputs unless the kernel has more positions."""
    return Direct(_geometry(layer, kernel.shape).depthwise_gradients(x, dz))


def _weighted_sum(factors: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Σ_i f_i v_i, float32 of the shape of one example's values."""
    flat = tf.reshape(values, [tf.shape(values)[0], values.shape[1:].num_elements()])
    total = tf.linalg.matvec(flat, factors, transpose_a=True)
    return tf.reshape(total, values.shape[1:])


def _geometry(layer: Any, kernel_shape: tuple[int, ...], groups: int = 1) -> Convolution:
    return Convolution(
        tuple(kernel_shape), layer.strides, layer.dilation_rate, layer.padding, groups
    )


def _channels_last(values: tf.Tensor, layer: Any) -> tf.Tensor:
    """Float32 `[batch, *spatial, channels]`."""
    values = tf.cast(values, tf.float32)
    if layer.data_format == "channels_last":
        return values
    return tf.transpose(values, [0, *range(2, values.shape.rank), 1])


def _bias_gradients(cotangents: tf.Tensor, layer: Any) -> tf.Tensor:
    """Sums over the positions that an entry of the bias is added to, float32 `[batch, bias]`.

    Keras adds a bias along the last axis whenever the sizes match, even if channels come first.
    """
    if cotangents.shape[-1] != layer.bias.shape[0]:
        cotangents = _channels_last(cotangents, layer)
    dz = by_position(cotangents)
    ones = tf.ones_like(dz[:, tf.newaxis, :, 0])
    return tf.squeeze(tf.matmul(ones, dz), axis=1)  # faster than a sum over axis 1


def _biased(outputs: tf.Tensor, layer: Any) -> tf.Tensor:
    if layer.bias is None:
        return outputs
    shape = (-1,) if layer.data_format == "channels_last" else (-1, *(1,) * layer.rank)
    return keras.ops.add(outputs, keras.ops.reshape(layer.bias, shape))


RULES: dict[type[keras.layers.Layer], Callable[..., Any]] = {
    keras.layers.Conv1D: call_convolution,
    keras.layers.Conv2D: call_convolution,
    keras.layers.Conv3D: call_convolution,
    keras.layers.DepthwiseConv1D: call_depthwise_convolution,
    keras.layers.DepthwiseConv2D: call_depthwise_convolution,
    keras.layers.SeparableConv1D: call_separable_convolution,
    keras.layers.SeparableConv2D: call_separable_convolution,
    keras.layers.Conv1DTranspose: call_transposed_convolution,
    keras.layers.Conv2DTranspose: call_transposed_convolution,
    keras.layers.Conv3DTranspose: call_transposed_convolution,
}
