"""A table that is the output layer too: its norms without a per-example gradient of the table.

Source: "Phantom Clipping" of the tied-embedding paper. Its formula,
`n_in + ‖RᵀH‖² + 2 Σ R[t, s_l]·⟨G_l, H_t⟩`, may cancel in floating point; here all terms are
squares. With one position, the rows that an example looked up are summed explicitly and the others
are those of an outer product, at the cost of the logits and the lookups themselves. With several
positions, gradients are summed explicitly, of a few examples at a time, which costs what the
gradient of the output layer costs.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import keras
import tensorflow as tf

from dp_sparse.clipping.uses import numerics
from dp_sparse.clipping.uses.lookups import Rows
from dp_sparse.clipping.uses.product import Product
from dp_sparse.core import UnsupportedLayerError, xla


@dataclasses.dataclass(frozen=True)
class Tied:
    """W `[rows, width]`, looked up and used as `logits = H·Wᵀ`; either may be missing.

    Attributes:
        num_rows: Rows of W.
        row_ids: s, int64 `[batch, lookups]`.
        valid: bool `[batch, lookups]`: false for masked lookups.
        row_cotangents: G, float32 `[batch, lookups, width]`.
        hidden: H, float32 `[batch, positions, width]`.
        logit_cotangents: R, float32 `[batch, positions, rows]`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("row_cotangents", "hidden", "logit_cotangents")
    holds_gradients: ClassVar[bool] = False
    num_rows: int
    row_ids: tf.Tensor
    valid: tf.Tensor
    row_cotangents: tf.Tensor
    hidden: tf.Tensor
    logit_cotangents: tf.Tensor

    @classmethod
    def of_lookups(cls, variable: keras.Variable, use: Rows) -> "Tied":
        """The same lookups, in a variable that is no table: each of its rows gets noise."""
        num_rows, width = variable.shape
        batch = tf.shape(use.row_ids)[0]
        hidden, logits = (tf.zeros([batch, 0, size]) for size in (width, num_rows))
        return cls(num_rows, use.row_ids, use.valid, use.cotangents, hidden, logits)

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖² = Σ over the rows of ‖(RᵀH) + Σ of G for that row‖².

        With at most one position, time and memory O(batch · (rows + lookups · width)). With more,
        time O(batch · positions · rows · width), as the output layer itself, and the memory of one
        example's gradient, or of 2²⁰ entries: the clipped sum takes more.
        """
        few = self.hidden.shape[1] in (0, 1)
        norms = self._of_one_position() if few else self._of_several_positions()
        given = tf.sqrt(numerics.squares(self._given(), 2))
        hidden, logits = (
            numerics.squares(self.hidden, 2),
            numerics.squares(self.logit_cotangents, 2),
        )
        masses = tf.reduce_sum(given, 1) + tf.reduce_sum(tf.sqrt(hidden) * tf.sqrt(logits), 1)
        return numerics.never_cancelled(norms, masses)

    def joined_with(self, others: Sequence["Tied"]) -> "Tied":
        """All calls of the layer as one use."""
        parts, names = [self, *others], ("row_ids", "valid", *self.float_fields)
        whole = {name: _concatenated([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(self, **whole)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, float64 `[rows, width]`."""
        as_output = Product(self.logit_cotangents, self.hidden).clipped_sum(factors)
        given = self._given() * numerics.expanded(factors, self.row_cotangents)
        indices = tf.reshape(self.row_ids, [-1, 1])
        return tf.tensor_scatter_nd_add(
            numerics.exact(as_output), indices, numerics.exact(numerics.flat(given))
        )

    def _given(self) -> tf.Tensor:
        """G without masked lookups."""
        return self.row_cotangents * tf.cast(self.valid, tf.float32)[..., tf.newaxis]

    def _of_one_position(self) -> tf.Tensor:
        """‖·‖² over the rows looked up, and ‖r‖²‖h‖² over the others."""
        pairs, sums = self._looked_up()
        r, h = tf.reduce_sum(self.logit_cotangents, axis=1), tf.reduce_sum(self.hidden, axis=1)
        as_output = numerics.exact(tf.gather_nd(r, pairs))[:, tf.newaxis] * numerics.exact(
            tf.gather(h, pairs[:, 0])
        )
        squared = tf.reduce_sum(tf.square(sums + as_output), axis=1)
        norms = tf.math.unsorted_segment_sum(squared, pairs[:, 0], tf.shape(h)[0])
        others = tf.tensor_scatter_nd_update(r, pairs, tf.zeros(tf.shape(pairs)[:1]))
        return tf.cast(norms, tf.float32) + numerics.squares(others) * numerics.squares(h)

    def _of_several_positions(self) -> tf.Tensor:
        """‖·‖² of the whole gradients, a few examples at a time."""
        pairs, sums = self._looked_up()
        batch = tf.shape(self.hidden)[0]
        begins = tf.searchsorted(pairs[:, 0], tf.range(tf.cast(batch, tf.int64) + 1))

        def of_part(begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
            hidden = numerics.part_of(self.hidden, begin, size)
            cotangents = numerics.part_of(self.logit_cotangents, begin, size)
            gradients = tf.matmul(cotangents, hidden, transpose_a=True)  # [part, rows, width]
            own = slice(begins[begin], begins[begin + size])  # the pairs of these examples
            given = tf.cast(sums[own], tf.float32)
            first = tf.stack([tf.cast(begin, tf.int64), 0])
            return numerics.squares(tf.tensor_scatter_nd_add(gradients, pairs[own] - first, given))

        return numerics.by_part(batch, self.num_rows * self.hidden.shape[2], of_part)

    def _looked_up(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Each example's distinct rows, in the order of the examples, and the sums of their G.

        (example, row), int64 `[distinct, 2]`, and float64 `[distinct, width]`.
        """
        if xla.static_shapes():
            raise UnsupportedLayerError(
                "Tied embeddings have no static shapes yet: compile with jit_compile=False, or "
                "untie the output layer."
            )
        example = tf.range(tf.shape(self.row_ids, tf.int64)[0])[:, tf.newaxis]
        keys = tf.boolean_mask(example * self.num_rows + self.row_ids, self.valid)
        distinct, slot = tf.unique(keys)
        given = numerics.exact(tf.boolean_mask(self.row_cotangents, self.valid))
        sums = tf.math.unsorted_segment_sum(given, slot, tf.size(distinct))
        return tf.stack([distinct // self.num_rows, distinct % self.num_rows], axis=1), sums


def _concatenated(parts: list[tf.Tensor]) -> tf.Tensor:
    """Along axis 1; a part alone is not copied: cotangents of logits are the step's largest."""
    filled = [part for part in parts if part.shape[1] != 0]
    return tf.concat(filled, axis=1) if len(filled) > 1 else (filled or parts)[0]
