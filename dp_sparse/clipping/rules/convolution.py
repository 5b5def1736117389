"""Convolutions: `z = x ∗ W + b`, plain, grouped, depthwise, separable and transposed.

A kernel whose per-example gradients fit a budget is recorded by these gradients: computing them
costs what an ordinary weight gradient costs (below), and they are read twice more, for
the norms and for the sum. A larger kernel is recorded as a bilinear form: norms block by block,
then the weight gradient of the scaled cotangents, without any per-example gradient.

The bilinear form of a convolution: per-example gradients of its kernel as matrix products.

Each kernel offset sees a strided slice of the padded input, and a run of offsets along the last
spatial axis is a matrix product over output positions (Rochette et al. 2019 give the per-example
gradient as a convolution; this is its im2col form, one line of the kernel at a time). All products
together cost what an ordinary weight gradient costs. The slices of a line are
`[batch, positions, width]`, and those of one line are in memory at a time. A kernel of few channels
is one product for all of its lines. A transposed convolution swaps the roles of input and
cotangent.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import Explicit, GradientTerm, Linear, Product, squares
from dp_sparse.clipping.rules.activation import watched_preactivation
from dp_sparse.clipping.tap import Tap

_BLOCK_WIDTH = 1024  # most columns of a block's inputs, unless one offset has more channels
_NARROW_WIDTH = 64  # most columns of a kernel that is a single block
_FEW_CHANNELS = 8  # with fewer channels, slices are copied faster with channels first
DIRECT_BUDGET = 2**25  # bytes of one kernel's per-example gradients, of the largest batch


@dataclasses.dataclass(frozen=True)
class GroupedProduct(Product):
    """One product for each group of channels; the groups have separate weights.

    Attributes:
        inputs: float32 `[batch, groups, positions, in / groups]`.
        cotangents: float32 `[batch, groups, positions, out / groups]`.
    """

    def squared_norms(self) -> tf.Tensor:
        """Σ over groups of the norms of its products."""
        of_groups = Product(_merged(self.inputs), _merged(self.cotangents))
        norms = tf.reshape(of_groups.squared_norms(), [-1, self.inputs.shape[1]])
        return tf.reduce_sum(norms, axis=1)


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The geometry of a convolution, channels last.

    Attributes:
        kernel_shape: `[*size, in / groups, out]`; of a depthwise one `[*size, in, multiplier]`.
        strides: One per spatial axis.
        dilation_rate: One per spatial axis.
        padding: "valid", "same" or "causal".
        groups: How many groups the channels form.
    """

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    dilation_rate: tuple[int, ...]
    padding: str
    groups: int = 1

    def blocks(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> Iterator[Product]:
        """Products over the output positions, each with a run of offsets of one kernel line.

        Args:
            inputs: x, float32 `[batch, *spatial, in]`.
            cotangents: ∂L/∂z, float32 `[batch, *output spatial, out]`.
        """
        padded, sizes = self._padded_by_group(inputs, cotangents), _spatial_sizes(cotangents)
        dz = by_position(self._by_group(cotangents))
        for taps in self._runs():
            columns = self._columns(padded, taps, sizes[-1])
            for offsets in itertools.product(*map(range, self.kernel_shape[:-3])):
                yield self._product(by_position(self._windows(columns, offsets, sizes)), dz)

    def gradient(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """Σ_i g_i, float32 of the shape of the kernel."""
        # On the CPU the grouped op needs XLA and is slower than its products; the one for strided
        # kernels of size 1 writes outside its memory at a batch of 1 (TensorFlow 2.21).
        if self.groups > 1 or (math.prod(self.kernel_shape[:-2]) == 1 and max(self.strides) > 1):
            letters = "bgso,bgsi->goi" if self.groups > 1 else "bso,bsi->oi"
            blocks = self.blocks(inputs, cotangents)
            return self.assembled([tf.einsum(letters, b.cotangents, b.inputs) for b in blocks])
        padded = self._padded(inputs)
        kernel = tf.zeros(self.kernel_shape)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(kernel)
            outputs = keras.ops.conv(
                padded, kernel, self.strides, "valid", "channels_last", self.dilation_rate
            )
        return tape.gradient(outputs, kernel, output_gradients=cotangents)

    def example_gradients(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """g_i by block, each float32 `[batch, (groups,) out / groups, width]`."""
        *size, channels, _ = self.kernel_shape
        if channels < _FEW_CHANNELS and math.prod(size) * channels <= _NARROW_WIDTH:
            return (self._narrow_gradients(inputs, cotangents),)
        parts: list[tf.Tensor] = []
        blocks = self.blocks(inputs, cotangents)
        while True:
            with tf.control_dependencies(parts[-1:]):  # one block's inputs in memory at a time
                block = next(blocks, None)
                if block is None:
                    return tuple(parts)
                # Faster than its transpose: the inputs are mostly the wider factor.
                parts.append(tf.matmul(block.cotangents, block.inputs, transpose_a=True))

    def assembled(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The kernel's gradient from its blocks' in order, `[(groups,) out / groups, width]`."""
        lines = len(parts) // len(self._runs())
        runs = [tf.stack(parts[i : i + lines], axis=-2) for i in range(0, len(parts), lines)]
        kernel = tf.concat(runs, axis=-1)  # [(groups,) out / groups, lines, width]
        kernel = tf.reshape(kernel, [self.kernel_shape[-1], -1])
        return tf.reshape(tf.transpose(kernel), self.kernel_shape)

    def depthwise_gradients(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """g_i of a depthwise kernel, float32 `[batch, *size, in, multiplier]`."""
        *size, _, multiplier = self.kernel_shape
        padded, sizes = self._padded_by_group(inputs, cotangents), _spatial_sizes(cotangents)
        padded = tf.repeat(padded, multiplier, axis=-1)
        parts: list[tf.Tensor] = []
        for offsets in itertools.product(*map(range, size)):
            with tf.control_dependencies(parts[-1:]):
                products = self._windows(padded, offsets, sizes) * cotangents
                parts.append(tf.reduce_sum(products, axis=list(range(1, 1 + len(size)))))
        return tf.reshape(tf.stack(parts, axis=1), [-1, *self.kernel_shape])

    def _narrow_gradients(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """g_i as one block, float32 `[batch, groups, out / groups, width]`.

        Channels come first, so that whole lines of positions are copied for an offset.
        """
        first, *rest, channels, _ = self.kernel_shape
        padded, sizes = self._padded_by_group(inputs, cotangents), _spatial_sizes(cotangents)
        dz = by_position(self._by_group(cotangents))
        slab = _channels_first(padded)
        for axis in range(len(rest), 0, -1):
            taps = range(self.kernel_shape[axis])
            slab = tf.concat([self._window(slab, axis, t, sizes[axis], 2) for t in taps], axis=1)
        slab = tf.gather(slab, self._met(0, range(first), sizes[0]), axis=2)
        width = math.prod(rest) * channels  # [batch · groups, width, first, *sizes]
        slab = tf.reshape(slab, [-1, width * first, math.prod(sizes)])
        product = tf.reshape(tf.matmul(slab, dz), [-1, self.groups, width, first, dz.shape[-1]])
        shape = [-1, self.groups, dz.shape[-1], first * width]
        return tf.reshape(tf.transpose(product, [0, 1, 4, 3, 2]), shape)

    def _runs(self) -> list[range]:
        """The offsets along the last spatial axis, in runs that make blocks of bounded width."""
        *_, size, channels, _ = self.kernel_shape
        length = max(1, _BLOCK_WIDTH // channels)
        return [range(start, min(start + length, size)) for start in range(0, size, length)]

    def _columns(self, padded: tf.Tensor, taps: range, size: Any) -> tf.Tensor:
        """`[batch, *spatial, taps · channels]`, the last spatial axis that of the output."""
        met = tf.transpose(self._met(-1, taps, size))
        columns = tf.gather(padded, met, axis=padded.shape.rank - 2)
        *outer, _, channels = _known_shape(padded)
        return tf.reshape(columns, [*outer, size, len(taps) * channels])

    def _windows(self, values: tf.Tensor, offsets: Sequence[int], sizes: list[Any]) -> tf.Tensor:
        """The output positions' values along the first spatial axes, channels last."""
        for axis, tap in enumerate(offsets):
            values = self._window(values, axis, tap, sizes[axis], 1)
        return values

    def _window(
        self, values: tf.Tensor, axis: int, tap: int, size: Any, first_axis: int
    ) -> tf.Tensor:
        """The `size` positions of a spatial axis that kernel offset `tap` meets."""
        if self.strides[axis] == 1:
            start = tap * self.dilation_rate[axis]
            return values[(*[slice(None)] * (first_axis + axis), slice(start, start + size))]
        met = self._met(axis, range(tap, tap + 1), size)[0]
        return tf.gather(values, met, axis=first_axis + axis)  # faster than a slice with strides

    def _met(self, axis: int, taps: range, size: Any) -> tf.Tensor:
        """The places along a spatial axis that `size` positions meet, `[taps, size]`."""
        reach = self.dilation_rate[axis] * tf.range(taps.start, taps.stop)
        return reach[:, tf.newaxis] + self.strides[axis] * tf.range(size)

    def _product(self, slab: tf.Tensor, dz: tf.Tensor) -> Product:
        if self.groups == 1:
            return Product(slab, dz)
        shapes = [[-1, self.groups, *_known_shape(values)[1:]] for values in (slab, dz)]
        return GroupedProduct(tf.reshape(slab, shapes[0]), tf.reshape(dz, shapes[1]))

    def _padded_by_group(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """`[batch · groups, *spatial, in / groups]`, computed after the cotangents."""
        with tf.control_dependencies([cotangents]):  # no slices in memory in the forward pass
            inputs = tf.identity(inputs)
        return self._by_group(self._padded(inputs))

    def _by_group(self, values: tf.Tensor) -> tf.Tensor:
        """`[batch, *spatial, channels]` as `[batch · groups, *spatial, channels / groups]`."""
        if self.groups == 1:
            return values
        *outer, channels = _known_shape(values)
        values = tf.reshape(values, [*outer, self.groups, channels // self.groups])
        rank = len(outer)
        return _merged(tf.transpose(values, [0, rank, *range(1, rank), rank + 1]))

    def _padded(self, inputs: tf.Tensor) -> tf.Tensor:
        """The inputs with explicit zeros, so that the convolution is "valid"."""
        if self.padding == "valid":
            return inputs
        pairs = [self._padding_of(axis, size) for axis, size in enumerate(_spatial_sizes(inputs))]
        return tf.pad(inputs, [(0, 0), *pairs, (0, 0)])

    def _padding_of(self, axis: int, size: Any) -> tuple[Any, Any]:
        stride = self.strides[axis]
        span = (self.kernel_shape[axis] - 1) * self.dilation_rate[axis]
        if self.padding == "causal":
            return span, 0
        missing = ((size + stride - 1) // stride - 1) * stride + 1 + span - size
        missing = tf.maximum(missing, 0) if tf.is_tensor(missing) else max(missing, 0)
        return missing // 2, missing - missing // 2


@dataclasses.dataclass(frozen=True)
class TransposedConvolution:
    """The transpose of `forward`, with the same kernel: it maps outputs back to inputs."""

    forward: Convolution

    def blocks(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> Iterator[Product]:
        """The blocks of `forward`, with input and cotangent swapped."""
        return self.forward.blocks(cotangents, inputs)

    def gradient(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """Σ_i g_i, float32 of the shape of the kernel."""
        return self.forward.gradient(cotangents, inputs)

    def example_gradients(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """g_i by block, as `forward` gives them."""
        return self.forward.example_gradients(cotangents, inputs)

    def assembled(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The kernel's gradient from those of its blocks."""
        return self.forward.assembled(parts)


def by_position(values: tf.Tensor) -> tf.Tensor:
    """`[batch, *spatial, channels]` as `[batch, positions, channels]`."""
    batch, *sizes, channels = _known_shape(values)
    return tf.reshape(values, [batch, math.prod(sizes), channels])


def _merged(values: tf.Tensor) -> tf.Tensor:
    """`[batch, groups, ...]` as `[batch · groups, ...]`."""
    return tf.reshape(values, [-1, *_known_shape(values)[2:]])


def _channels_first(values: tf.Tensor) -> tf.Tensor:
    """`[batch, *spatial, channels]` as `[batch, channels, *spatial]`."""
    rank = values.shape.rank
    return tf.transpose(values, [0, rank - 1, *range(1, rank - 1)])


def _spatial_sizes(values: tf.Tensor) -> list[Any]:
    """The sizes of the spatial axes, channels last."""
    return _known_shape(values)[1:-1]


def _known_shape(values: tf.Tensor) -> list[Any]:
    """Each axis' size: an int where it is known, else a tensor."""
    dynamic = tf.shape(values)
    return [dynamic[i] if size is None else size for i, size in enumerate(values.shape)]


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
    term_of = functools.partial(_kernel_term, tap, layer.kernel, form)
    return _recorded(layer, call, tap, inputs, layer.kernel, term_of)


def call_transposed_convolution(
    layer: Any, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs Conv1DTranspose, Conv2DTranspose or Conv3DTranspose; records its kernel and its bias."""
    form = TransposedConvolution(_geometry(layer, layer.kernel.shape))
    term_of = functools.partial(_kernel_term, tap, layer.kernel, form)
    return _recorded(layer, call, tap, inputs, layer.kernel, term_of)


def call_depthwise_convolution(
    layer: Any, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Runs DepthwiseConv1D or DepthwiseConv2D and records its kernel and its bias."""
    term_of = functools.partial(_depthwise_term, layer, layer.kernel)
    return _recorded(layer, call, tap, inputs, layer.kernel, term_of)


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

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        x, dz = _channels_last(inputs, layer), _channels_last(cotangents[0], layer)
        return [(depthwise, _depthwise_term(layer, depthwise, x, dz))]

    if tap.trains(depthwise):
        tap.watch([between], terms_of)

    def second_step(between: tf.Tensor) -> tf.Tensor:
        outputs = keras.ops.conv(between, pointwise, 1, "valid", layer.data_format)
        return layer.activation(_biased(outputs, layer))

    ones = (1,) * layer.rank
    form = Convolution(tuple(pointwise.shape), ones, ones, "valid")
    term_of = functools.partial(_kernel_term, tap, pointwise, form)
    return _recorded(layer, second_step, tap, between, pointwise, term_of)


def _recorded(
    layer: Any,
    call: Callable[..., Any],
    tap: Tap,
    inputs: tf.Tensor,
    kernel: keras.Variable,
    term_of: Callable[[tf.Tensor, tf.Tensor], GradientTerm],
) -> tf.Tensor:
    """Runs `call`; its pre-activation's cotangent gives `kernel`'s use and the bias."""

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        terms: list[tuple[keras.Variable, GradientTerm]] = []
        if tap.trains(kernel):
            x, dz = _channels_last(inputs, layer), _channels_last(cotangents[0], layer)
            terms.append((kernel, term_of(x, dz)))
        if tap.trains(layer.bias):
            terms.append((layer.bias, Explicit(_bias_gradients(cotangents[0], layer))))
        return terms

    def watch(preactivation: tf.Tensor) -> tf.Tensor:
        tap.watch([preactivation], terms_of)
        return preactivation

    with watched_preactivation(layer, watch):
        return call(inputs)


def _kernel_term(
    tap: Tap, kernel: keras.Variable, form: Form, x: tf.Tensor, dz: tf.Tensor
) -> GradientTerm:
    """The use of a kernel, of one kind for all its calls in a step, so that they can be joined."""
    if 4 * tap.batch_capacity * math.prod(kernel.shape) <= DIRECT_BUDGET:
        return KernelGradients(form.example_gradients(x, dz), form)
    return Linear((x,), (dz,), form)


def _depthwise_term(
    layer: Any, kernel: keras.Variable, x: tf.Tensor, dz: tf.Tensor
) -> GradientTerm:
    """Per-example gradients, smaller than the outputs unless the kernel has more positions."""
    return Explicit(_geometry(layer, kernel.shape).depthwise_gradients(x, dz))


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
