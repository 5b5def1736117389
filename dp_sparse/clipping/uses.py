"""How a layer call used a variable: squared per-example gradient norms and the clipped sum.

A use holds activations and cotangents of a whole batch, from which both quantities come without any
per-example gradient of a matrix or a table ("book-keeping"): a product costs what an
ordinary weight gradient costs. Uses of one variable are joined before norms are taken, since norms
of several uses do not add.

Sums over a batch are float64, so that one example cannot move how others are rounded by more than
it is allowed to move the sum; but matrix products, which are float32 (`docs/guarantees.md`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol, Self

import numpy as np
import tensorflow as tf

from dp_sparse import xla
from dp_sparse.groups import grouped

_GRAM_COST = 4  # of a float64 product, in those of a float32 one
_PART_ENTRIES = 2**20  # of gradients of several examples that are only needed for their norms
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class Use(Protocol):
    """One variable's use in a batch, with cotangents of the sum of per-example losses.

    Attributes:
        float_fields: Names of the fields that hold values of examples, `[batch, ...]`.
        holds_gradients: Whether they are gradients themselves, sums of which much may cancel.
    """

    float_fields: ClassVar[tuple[str, ...]]
    holds_gradients: ClassVar[bool]

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖² of each example's gradient of this variable, float32 `[batch]`."""
        ...

    def joined_with(self, others: Sequence[Self]) -> Self:
        """One use of the variable for this and its others.

        Raises:
            ValueError: The uses do not fit together.
        """
        ...


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
        """Σ_i f_i x_iᵀ dz_i, float32 `[in, out]`."""
        scaled = self.cotangents * expanded(factors, self.cotangents)
        return tf.matmul(flat(self.inputs), flat(scaled), transpose_a=True)

    def joined_with(self, others: Sequence[Self]) -> Self:
        """The positions of all of them."""
        uses = [use._by_position() for use in (self, *others)]
        inputs, cotangents = [use.inputs for use in uses], [use.cotangents for use in uses]
        return type(self)(tf.concat(inputs, axis=-2), tf.concat(cotangents, axis=-2))

    def _by_position(self) -> Self:
        """The same with an axis of positions."""
        if self.inputs.shape.rank > 2:
            return self
        return type(self)(self.inputs[:, tf.newaxis, :], self.cotangents[:, tf.newaxis, :])


@dataclasses.dataclass(frozen=True)
class Direct:
    """A variable small enough for its per-example gradients themselves.

    Attributes:
        gradients: float32 `[batch, *shape of the variable]`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("gradients",)
    holds_gradients: ClassVar[bool] = True
    gradients: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖²."""
        return squares(self.gradients)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, float64, of the variable's shape."""
        flat = tf.reshape(self.gradients, [tf.shape(self.gradients)[0], -1])
        total = tf.matmul(exact(factors)[tf.newaxis], exact(flat))
        return tf.reshape(total, self.gradients.shape[1:])

    def joined_with(self, others: Sequence["Direct"]) -> "Direct":
        """The sum of their gradients."""
        return Direct(tf.add_n([self.gradients, *(other.gradients for other in others)]))


def _squared_norms_by_part(inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
    """‖xᵀ dz‖² of each example, a few examples at a time, so that memory stays small.

    Args:
        inputs: x, float32 `[batch, positions, in]`.
        cotangents: dz, float32 `[batch, positions, out]`.
    """
    narrow, wide = sorted((inputs, cotangents), key=lambda side: side.shape[2])
    columns = min(wide.shape[2], max(1, _PART_ENTRIES // narrow.shape[2]))

    def of_part(begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        narrow_part, norms = part_of(narrow, begin, size), tf.zeros([size], tf.float64)
        for start in range(0, wide.shape[2], columns):
            with tf.control_dependencies([norms]):  # one chunk in memory at a time
                chunk = part_of(wide[..., start : start + columns], begin, size)
                norms += exact(squares(tf.matmul(narrow_part, chunk, transpose_a=True)))
        return tf.cast(norms, tf.float32)

    return by_part(tf.shape(inputs)[0], narrow.shape[2] * columns, of_part)


def part_of(values: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`size` examples from `begin` on."""
    rest = values.shape.rank - 1
    return tf.slice(values, tf.stack([begin, *[0] * rest]), tf.stack([size, *[-1] * rest]))


def by_part(
    batch: tf.Tensor, entries: int, of_part: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """What `of_part` makes of so many examples (2nd argument) from the 1st on, in one piece.

    All parts have one size, so the last one may begin before the one before it ends.

    Args:
        batch: How many examples there are, int32 scalar.
        entries: How many numbers each of them takes; a part has 2²⁰, or one example.
        of_part: Its result is float32 `[examples of the part]`.
    """
    size = tf.minimum(max(1, _PART_ENTRIES // entries), batch)
    count = tf.maximum(-(-batch // tf.maximum(size, 1)), 1)  # an empty batch is one empty part

    def add_part(index: tf.Tensor, parts: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        begin = tf.minimum(index * size, batch - size)
        return index + 1, parts.write(index, of_part(begin, size))

    parts = tf.TensorArray(tf.float32, count, element_shape=[None])
    _, parts = tf.while_loop(
        lambda index, _: index < count, add_part, (tf.constant(0), parts), parallel_iterations=1
    )
    found = tf.reshape(parts.stack(), [count * size])
    before = (count - 1) * size
    return tf.concat([found[:before], found[tf.size(found) - (batch - before) :]], 0)


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
        """All calls as one use."""
        if any(other.form != self.form for other in others):
            raise ValueError(f"used in different ways: {[self.form, *(o.form for o in others)]}")
        uses = [self, *others]
        return Linear(
            tuple(x for use in uses for x in use.inputs),
            tuple(dz for use in uses for dz in use.cotangents),
            self.form,
        )

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, of the shape of W."""
        calls = zip(self.inputs, self.cotangents, strict=True)
        return tf.add_n([self.form.gradient(x, dz * expanded(factors, dz)) for x, dz in calls])


@dataclasses.dataclass(frozen=True)
class Rows:
    """Lookups in a table.

    Attributes:
        row_ids: int64 `[batch, lookups]`.
        valid: bool `[batch, lookups]`: false for masked lookups, which do not train their row.
        cotangents: ∂L/∂(looked-up rows), float32 `[batch, lookups, width]`.
        slots: int32 `[batch, lookups]`: which of the step's rows a lookup belongs to, -1 for none;
            set by `restricted`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("cotangents",)
    holds_gradients: ClassVar[bool] = False
    row_ids: tf.Tensor
    valid: tf.Tensor
    cotangents: tf.Tensor
    slots: tf.Tensor | None = None

    def restricted(self, slots: tf.Tensor) -> "Rows":
        """These lookups without those of unchosen rows (slot -1) and masked ones."""
        return dataclasses.replace(self, slots=tf.where(self.valid, slots, -1))

    def squared_norms(self) -> tf.Tensor:
        """Σ over the distinct chosen rows of an example of ‖Σ of its cotangents for that row‖².

        Costs O(lookups · width).
        """
        chosen = tf.cast(self.valid if self.slots is None else self.slots >= 0, tf.float32)
        if self.row_ids.shape[1] == 1:
            return squares(self.cotangents) * chosen[:, 0]
        cotangents = exact(self.cotangents * chosen[..., tf.newaxis])
        batch = tf.shape(self.row_ids, tf.int64)[0]
        example = tf.repeat(tf.range(batch), tf.shape(self.row_ids)[1])
        num_rows = tf.reduce_max(tf.concat([[0], tf.reshape(self.row_ids, [-1])], 0)) + 1
        groups = grouped(example * num_rows + tf.reshape(self.row_ids, [-1]), -1)
        pairs, position = groups.values, groups.places
        sums = tf.math.unsorted_segment_sum(flat(cotangents), position, tf.size(pairs))
        squared = tf.reduce_sum(tf.square(sums), axis=1)
        norms = tf.math.unsorted_segment_sum(squared, pairs // num_rows, batch)
        masses = tf.reduce_sum(tf.norm(cotangents, axis=2), axis=1)
        return never_cancelled(norms, masses)

    def clipped_sum(self, factors: tf.Tensor, num_slots: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i on the step's rows, float64 `[num_slots, width]`; slot -1 is dropped."""
        scaled = exact(self.cotangents * factors[:, tf.newaxis, tf.newaxis])
        return tf.math.unsorted_segment_sum(flat(scaled), tf.reshape(self.slots, [-1]), num_slots)

    def joined_with(self, others: Sequence["Rows"]) -> "Rows":
        """The lookups of all of them, none restricted yet."""
        names = ("row_ids", "valid", "cotangents")
        parts = [[getattr(use, name) for use in (self, *others)] for name in names]
        return Rows(*(tf.concat(part, axis=1) for part in parts))


def joined(uses: Sequence[Use]) -> Use:
    """One use for all uses of a variable, so that its gradient is whole before its norm is taken.

    Raises:
        ValueError: The uses are of different kinds (a table that is also a matrix).
    """
    kinds = {type(use) for use in uses}
    if len(kinds) > 1:
        raise ValueError(f"used in different ways: {sorted(kind.__name__ for kind in kinds)}")
    return uses[0].joined_with(uses[1:]) if len(uses) > 1 else uses[0]


def fields_of(use: Use) -> list[tf.Tensor]:
    """All tensors that a use holds of its examples, each `[batch, ...]`."""
    return [tensor for tensor in _tensors_of(use) if tensor.shape.rank != 0]


def scalars_of(use: Use) -> list[tf.Tensor]:
    """All tensors that a use holds of its batch, which no example may decide."""
    return [tensor for tensor in _tensors_of(use) if tensor.shape.rank == 0]


def _tensors_of(use: Use) -> list[tf.Tensor]:
    fields = [getattr(use, field.name) for field in dataclasses.fields(use)]  # type: ignore[arg-type]
    return [value for value in tf.nest.flatten(fields) if tf.is_tensor(value)]


def squares(values: tf.Tensor, start: int = 1) -> tf.Tensor:
    """Sums of squares over the axes from `start` on, never below the true ones.

    A square below float32's smallest normal number is flushed to 0, so each entry adds that number:
    otherwise tiny inputs times huge cotangents would pass for a gradient of norm 0.
    """
    axes = list(range(start, values.shape.rank))
    entries = values.shape[start:].num_elements()
    count = tf.reduce_prod(tf.shape(values)[start:]) if entries is None else entries
    floor = tf.cast(count, tf.float32) * _SMALLEST_NORMAL
    if xla.inside():  # which fuses this, has no kernel for norms, and would add in float32 in a row
        return tf.cast(tf.reduce_sum(tf.square(exact(values)), axis=axes), tf.float32) + floor
    return tf.square(tf.math.reduce_euclidean_norm(values, axis=axes)) + floor


def never_cancelled(squared_norms: tf.Tensor, masses: tf.Tensor) -> tf.Tensor:
    """Squared norms, float32, at least (mass / 1000)² of the example's terms, Σ of their norms.

    Terms that cancel leave a norm that float32 cannot tell from 0, or below it; their clipped terms
    would still swamp the batch's sum. The floor keeps every example's terms within 1000·C, and
    touches no example whose gradient is more than a thousandth of its terms.
    """
    return tf.cast(tf.maximum(squared_norms, tf.square(masses / 1000.0)), tf.float32)


def exact(values: tf.Tensor) -> tf.Tensor:
    """Values in float64, in which their sums are exact for all that privacy asks."""
    return tf.cast(values, tf.float64)


def expanded(factors: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """`factors` `[batch]` with as many axes as `values`."""
    return tf.reshape(factors, [-1] + [1] * (values.shape.rank - 1))


def flat(values: tf.Tensor) -> tf.Tensor:
    """`[batch, positions, width]` as `[batch · positions, width]`."""
    return tf.reshape(values, [-1, values.shape[-1]])
