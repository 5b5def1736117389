"""Convolutions: `z = x ∗ W + b`, plain, grouped, depthwise, separable and transposed.

Each kernel offset sees a strided slice of the padded input, and a run of offsets along the last
spatial axis is a matrix product over output positions (Rochette et al. 2019 give the per-example
gradient as a convolution; this is its im2col form, one kernel row at a time). A kernel whose
per-example gradients fit a budget is recorded by them: one pass of the size of an ordinary weight
gradient. A larger one is recorded as a bilinear form: norms block by block, then the weight
gradient of the scaled cotangents, without any per-example gradient. A transposed convolution swaps
the roles of input and cotangent.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.rules.activation import watched_preactivation
from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Direct, Linear, Product, Use

DIRECT_BUDGET = 2**25  # bytes of one kernel's per-example gradients, of the largest batch
_BLOCK_WIDTH = 1024  # columns of one block's inputs, at most (or one offset's channels)


@dataclasses.dataclass(frozen=True)
class GroupedProduct(Product):
    """One product for each group of channels, their weights disjoint.

    Attributes:
        inputs: float32 `[batch, positions, groups, in / groups]`.
        cotangents: float32 `[batch, positions, groups, out / groups]`.
    """

    def squared_norms(self) -> tf.Tensor:
        """Σ over groups of the norms of its products."""
        of_groups = Product(_groups_as_batch(self.inputs), _groups_as_batch(self.cotangents))
        norms = tf.reshape(of_groups.squared_norms(), [-1, self.inputs.shape[2]])
        return tf.reduce_sum(norms, axis=1)

    def by_position(self) -> Product:
        """Itself: it has an axis of positions."""
        return self


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The geometry of a convolution, channels last.

    A depthwise kernel `[*size, in, multiplier]` is one of `in` groups, `[*size, 1, out]`.

    Attributes:
        kernel_shape: `[*size, in / groups, out]`.
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
        """Products over the output positions, each with a run of offsets of one kernel row.

        Args:
            inputs: x, float32 `[batch, *spatial, in]`.
            cotangents: ∂L/∂z, float32 `[batch, *output spatial, out]`.
        """
        dz = self._by_group(_by_position(cotangents))
        padded = self._by_group(self._padded(inputs))
        for taps in self._runs():
            columns = self._columns(padded, taps, _sizes(cotangents))
            for offsets in self._rows():
                yield self._product(self._slab(columns, offsets, _sizes(cotangents)), dz)

    def gradient(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """Σ_i g_i, float32 of the shape of the kernel."""
        # On the CPU the grouped op needs XLA and is slower than its products; the one for strided
        # kernels of size 1 writes outside its memory at a batch of 1 (TensorFlow 2.21).
        if self.groups > 1 or (math.prod(self.kernel_shape[:-2]) == 1 and max(self.strides) > 1):
            letters = "bsgi,bsgo->gio" if self.groups > 1 else "bsi,bso->io"
            blocks = self.blocks(inputs, cotangents)
            products = [tf.einsum(letters, b.inputs, b.cotangents) for b in blocks]
            return self._assembled(products, [])
        padded = self._padded(inputs)
        kernel = tf.zeros(self.kernel_shape)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(kernel)
            outputs = keras.ops.conv(
                padded, kernel, self.strides, "valid", "channels_last", self.dilation_rate
            )
        return tape.gradient(outputs, kernel, output_gradients=cotangents)

    def example_gradients(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """g_i, float32 `[batch, *shape of the kernel]`."""
        products = [_of_each_example(b) for b in self.blocks(inputs, cotangents)]
        return self._assembled(products, [tf.shape(inputs)[0]])

    def _runs(self) -> list[range]:
        """The offsets along the last spatial axis, in runs that make blocks of bounded width."""
        *_, size, width, _ = self.kernel_shape
        length = max(1, _BLOCK_WIDTH // width)
        if self.groups > 1 and width == 1:  # depthwise: sums of elementwise products, offset-wise
            length = 1
        return [range(start, min(start + length, size)) for start in range(0, size, length)]

    def _rows(self) -> Iterator[tuple[int, ...]]:
        """The offsets along the other spatial axes."""
        return itertools.product(*(range(size) for size in self.kernel_shape[:-3]))

    def _columns(self, padded: tf.Tensor, taps: range, sizes: list[Any]) -> tf.Tensor:
        """`[batch, *spatial, groups, offsets · in / groups]`, the last spatial axis strided."""
        axis = len(self.strides) - 1
        slices = [self._window(padded, axis, tap, sizes[axis]) for tap in taps]
        return slices[0] if len(slices) == 1 else tf.concat(slices, axis=-1)

    def _slab(self, columns: tf.Tensor, offsets: tuple[int, ...], sizes: list[Any]) -> tf.Tensor:
        """`[batch, positions, groups, width]`: what one row of the kernel sees."""
        for axis, tap in enumerate(offsets):
            columns = self._window(columns, axis, tap, sizes[axis])
        return tf.reshape(columns, [tf.shape(columns)[0], _count(sizes), *columns.shape[-2:]])

    def _window(self, values: tf.Tensor, axis: int, tap: int, size: Any) -> tf.Tensor:
        """The `size` positions of a spatial axis that kernel offset `tap` meets."""
        start, stride = tap * self.dilation_rate[axis], self.strides[axis]
        if stride == 1:
            return values[(*[slice(None)] * (axis + 1), slice(start, start + size))]
        positions = start + stride * tf.range(size)
        return tf.gather(values, positions, axis=axis + 1)  # faster than a slice with strides

    def _product(self, slab: tf.Tensor, dz: tf.Tensor) -> Product:
        if self.groups > 1:
            return GroupedProduct(slab, dz)
        return Product(tf.squeeze(slab, axis=2), tf.squeeze(dz, axis=2))

    def _assembled(self, products: list[tf.Tensor], leading: list[tf.Tensor]) -> tf.Tensor:
        """The kernel's gradient from its blocks' in order, `[*leading, (groups,) width, out]`."""
        count, axis = math.prod(self.kernel_shape[:-3]), len(leading)
        runs = []
        for start in range(0, len(products), count):
            rows = tf.stack(products[start : start + count], axis=axis)
            if self.groups > 1:
                width = rows.shape[-2]
                rows = tf.reshape(tf.einsum("...gio->...igo", rows), [*leading, count, width, -1])
            runs.append(rows)
        whole = runs[0] if len(runs) == 1 else tf.concat(runs, axis=axis + 1)
        return tf.reshape(whole, [*leading, *self.kernel_shape])

    def _by_group(self, values: tf.Tensor) -> tf.Tensor:
        """`[..., channels]` as `[..., groups, channels / groups]`."""
        outer, channels = _shape(values)[:-1], values.shape[-1]
        return tf.reshape(values, [*outer, self.groups, channels // self.groups])

    def _padded(self, inputs: tf.Tensor) -> tf.Tensor:
        """The inputs with explicit zeros, so that the convolution is "valid"."""
        if self.padding == "valid":
            return inputs
        pairs = [self._padding_of(axis, size) for axis, size in enumerate(_sizes(inputs))]
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
    """The transpose of `forward`, which maps the outputs back to the inputs; same kernel."""

    forward: Convolution

    def blocks(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> Iterator[Product]:
        """The blocks of `forward`, roles swapped."""
        return self.forward.blocks(cotangents, inputs)

    def gradient(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """Σ_i g_i, float32 of the shape of the kernel."""
        return self.forward.gradient(cotangents, inputs)

    def example_gradients(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """g_i, float32 `[batch, *shape of the kernel]`."""
        return self.forward.example_gradients(cotangents, inputs)


Form = Convolution | TransposedConvolution


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

    The layer's own call fuses them, and hides the tensor between, whose cotangent is needed.
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
    """Of one kind for all calls of a kernel in a step, so that they can be joined."""
    if 4 * tap.batch_capacity * math.prod(kernel.shape) <= DIRECT_BUDGET:
        return Direct(form.example_gradients(x, dz))
    return Linear((x,), (dz,), form)


def _depthwise_use(layer: Any, kernel: keras.Variable, x: tf.Tensor, dz: tf.Tensor) -> Use:
    """Per-example gradients, smaller than the outputs unless the kernel has more positions."""
    *size, channels, multiplier = kernel.shape
    form = _geometry(layer, (*size, 1, channels * multiplier), groups=channels)
    gradients = form.example_gradients(x, dz)
    return Direct(tf.reshape(gradients, [tf.shape(x)[0], *kernel.shape]))


def _geometry(layer: Any, kernel_shape: tuple[int, ...], groups: int = 1) -> Convolution:
    return Convolution(
        tuple(kernel_shape), layer.strides, layer.dilation_rate, layer.padding, groups
    )


def _of_each_example(block: Product) -> tf.Tensor:
    """xᵀ dz, float32 `[batch, (groups,) in, out]`."""
    if isinstance(block, GroupedProduct):
        if block.inputs.shape[-1] == 1:
            return tf.reduce_sum(block.inputs * block.cotangents, axis=1)[:, :, tf.newaxis]
        return tf.einsum("bsgi,bsgo->bgio", block.inputs, block.cotangents)
    return tf.matmul(block.inputs, block.cotangents, transpose_a=True)


def _groups_as_batch(values: tf.Tensor) -> tf.Tensor:
    """`[batch, positions, groups, width]` as `[batch · groups, positions, width]`."""
    values = tf.transpose(values, [0, 2, 1, 3])
    return tf.reshape(values, [-1, *_shape(values)[2:]])


def _channels_last(values: tf.Tensor, layer: Any) -> tf.Tensor:
    """Float32 `[batch, *spatial, channels]`."""
    values = tf.cast(values, tf.float32)
    if layer.data_format == "channels_last":
        return values
    return tf.transpose(values, [0, *range(2, values.shape.rank), 1])


def _bias_gradients(cotangents: tf.Tensor, layer: Any) -> tf.Tensor:
    """Sums over the positions that share an entry of the bias, float32 `[batch, bias]`.

    Keras adds a bias along the last axis whenever the sizes match, even if channels come first.
    """
    if cotangents.shape[-1] != layer.bias.shape[0]:
        cotangents = _channels_last(cotangents, layer)
    by_position = _by_position(cotangents)
    ones = tf.ones_like(by_position[:, tf.newaxis, :, 0])
    return tf.squeeze(tf.matmul(ones, by_position), axis=1)  # faster than a sum over axis 1


def _biased(outputs: tf.Tensor, layer: Any) -> tf.Tensor:
    if layer.bias is None:
        return outputs
    shape = (-1,) if layer.data_format == "channels_last" else (-1, *(1,) * layer.rank)
    return keras.ops.add(outputs, keras.ops.reshape(layer.bias, shape))


def _by_position(values: tf.Tensor) -> tf.Tensor:
    """`[batch, *spatial, channels]` as `[batch, positions, channels]`."""
    return tf.reshape(values, [tf.shape(values)[0], _count(_sizes(values)), values.shape[-1]])


def _shape(values: tf.Tensor) -> list[Any]:
    """Each axis' size: an int where it is known, else a tensor."""
    dynamic = tf.shape(values)
    return [dynamic[i] if size is None else size for i, size in enumerate(values.shape)]


def _sizes(values: tf.Tensor) -> list[Any]:
    """The sizes of the spatial axes."""
    return _shape(values)[1:-1]


def _count(sizes: list[Any]) -> int:
    """How many positions there are, -1 if unknown."""
    return -1 if any(tf.is_tensor(size) for size in sizes) else math.prod(sizes)


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
