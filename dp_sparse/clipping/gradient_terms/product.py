"""Products of activations and weights, and any bilinear form of the two."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol, Self

import tensorflow as tf

from dp_sparse.clipping.gradient_terms import numerics
from dp_sparse.clipping.gradient_terms.numerics import (
    by_part,
    exact,
    expanded,
    flat,
    never_cancelled,
    part_of,
    squares,
)
from dp_sparse.clipping.gradient_terms.term import joined

_GRAM_COST = 4  # of a float64 product, in those of a float32 one


@dataclasses.dataclass(frozen=True)
class Product:
    """`z = x·W`, summed over positions.

    Attributes:
        inputs: x, float32 `[batch, positions, in]`, or `[batch, in]` for a single position.
        cotangents: ∂L/∂z, float32 `[batch, positions, out]` or `[batch, out]`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("inputs", "cotangents")
    holds_gradients: ClassVar[bool] = False
    inputs: tf.Tensor
    cotangents: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        """⟨x xᵀ, dz dzᵀ⟩ or ‖xᵀ dz‖², whichever is cheaper by shape; see `never_cancelled`."""
        if self.inputs.shape.rank == 2:
            return squares(self.inputs) * squares(self.cotangents)
        masses = tf.sqrt(squares(self.inputs, start=2)) * tf.sqrt(squares(self.cotangents, start=2))
        return never_cancelled(self._summed_squared_norms(), tf.reduce_sum(masses, axis=1))

    def _summed_squared_norms(self) -> tf.Tensor:
        positions = self.inputs.shape[1]
        width_in, width_out = self.inputs.shape[2], self.cotangents.shape[2]
        gram_entries = None if positions is None else positions * (width_in + width_out)
        if gram_entries is not None and _GRAM_COST * gram_entries <= width_in * width_out:
            # In float64: the terms of ⟨·,·⟩ may cancel, and squares of tiny numbers vanish.
            x, dz = tf.cast(self.inputs, tf.float64), tf.cast(self.cotangents, tf.float64)
            inner, outer = tf.einsum("bsd,btd->bst", x, x), tf.einsum("bsn,btn->bst", dz, dz)
            return tf.cast(tf.reduce_sum(inner * outer, axis=[1, 2]), tf.float32)
        return _squared_norms_by_part(self.inputs, self.cotangents)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i x_iᵀ dz_i, float32 `[in, out]`. The narrower side takes the factors."""
        x, dz = self.inputs, self.cotangents
        if x.shape[-1] < dz.shape[-1]:
            x = x * expanded(factors, x)
        else:
            dz = dz * expanded(factors, dz)
        return tf.matmul(flat(x), flat(dz), transpose_a=True)

    def joined_with(self, others: Sequence[Self]) -> Self:
        """The positions of all of them."""
        terms = [term._by_position() for term in (self, *others)]
        inputs, cotangents = [term.inputs for term in terms], [term.cotangents for term in terms]
        return type(self)(tf.concat(inputs, axis=-2), tf.concat(cotangents, axis=-2))

    def _by_position(self) -> Self:
        """The same with an axis of positions."""
        if self.inputs.shape.rank > 2:
            return self
        return type(self)(self.inputs[:, tf.newaxis, :], self.cotangents[:, tf.newaxis, :])


def _squared_norms_by_part(inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
    """‖xᵀ dz‖² of each example, a few examples at a time, so that memory stays small.

    Args:
        inputs: x, float32 `[batch, positions, in]`.
        cotangents: dz, float32 `[batch, positions, out]`.
    """
    narrow, wide = sorted((inputs, cotangents), key=lambda side: side.shape[2])
    columns = min(wide.shape[2], max(1, numerics.PART_ENTRIES // narrow.shape[2]))

    def of_part(begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        narrow_part, norms = part_of(narrow, begin, size), tf.zeros([size], tf.float64)
        for start in range(0, wide.shape[2], columns):
            with tf.control_dependencies([norms]):  # one chunk in memory at a time
                chunk = part_of(wide[..., start : start + columns], begin, size)
                norms += exact(squares(tf.matmul(narrow_part, chunk, transpose_a=True)))
        return tf.cast(norms, tf.float32)

    return by_part(tf.shape(inputs)[0], narrow.shape[2] * columns, of_part)


class BilinearForm(Protocol):
    """An operation `z = op(x, W)` that is linear in each of both, and works on each example alone.

    Its blocks depend on the shape of W alone, so that those of several calls can be joined.
    """

    def blocks(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> Iterator[Product]:
        """Products whose weights are disjoint parts of W, together all of it."""
        ...

    def gradient(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """Σ_i g_i, of the shape of W, at the cost of an ordinary weight gradient."""
        ...


@dataclasses.dataclass(frozen=True)
class Linear:
    """`z = op(x, W)` in one or several calls: convolutions, einsums.

    Attributes:
        inputs: x of each call, float32 `[batch, ...]`.
        cotangents: ∂L/∂z of each call, float32 `[batch, ...]`.
        form: The operation, the same for all calls.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("inputs", "cotangents")
    holds_gradients: ClassVar[bool] = False
    inputs: tuple[tf.Tensor, ...]
    cotangents: tuple[tf.Tensor, ...]
    form: BilinearForm

    def squared_norms(self) -> tf.Tensor:
        """Σ over the blocks of W of ‖g_i on the block‖², one block after the other in memory."""
        calls = zip(self.inputs, self.cotangents, strict=True)
        blocks = [self.form.blocks(x, dz) for x, dz in calls]
        norms = tf.zeros(tf.shape(self.inputs[0])[:1], tf.float64)
        while True:
            with tf.control_dependencies([norms]):
                block = [next(of_call, None) for of_call in blocks]
                if block[0] is None:
                    return tf.cast(norms, tf.float32)
                norms += exact(joined(block).squared_norms())  # type: ignore[arg-type]

    def joined_with(self, others: Sequence["Linear"]) -> "Linear":
        """All calls as one term."""
        if any(other.form != self.form for other in others):
            raise ValueError(f"used in different ways: {[self.form, *(o.form for o in others)]}")
        terms = [self, *others]
        return Linear(
            tuple(x for term in terms for x in term.inputs),
            tuple(dz for term in terms for dz in term.cotangents),
            self.form,
        )

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, of the shape of W."""
        calls = zip(self.inputs, self.cotangents, strict=True)
        return tf.add_n([self.form.gradient(x, dz * expanded(factors, dz)) for x, dz in calls])
