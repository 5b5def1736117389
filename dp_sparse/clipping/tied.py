"""A table that is the output layer too: its norms without a per-example gradient of the table.

Source: "Phantom Clipping" of the tied-embedding paper, with another decomposition. Its formula,
`n_in + ‖RᵀH‖² + 2 Σ R[t, s_l]·⟨G_l, H_t⟩`, may cancel in floating point; here the rows that an
example looked up are summed explicitly, so that all terms are squares.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from dp_sparse.clipping import uses
from dp_sparse.clipping.uses import Product, Rows


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
    num_rows: int
    row_ids: tf.Tensor
    valid: tf.Tensor
    row_cotangents: tf.Tensor
    hidden: tf.Tensor
    logit_cotangents: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖² = Σ over rows looked up of ‖Σ G + (RᵀH)‖² + Σ over the others of ‖(RᵀH)‖².

        Time O(batch · positions · rows · width), as the output layer itself; memory
        O(batch · (positions · lookups + lookups · width + rows)) and a chunk of rows.
        """
        given = self.row_cotangents * tf.cast(self.valid, tf.float32)[..., tf.newaxis]
        norms = self._of_rows_looked_up(given) + self._of_other_rows()
        terms = tf.sqrt(uses.squares(self.hidden, 2) * uses.squares(self.logit_cotangents, 2))
        masses = tf.reduce_sum(tf.sqrt(uses.squares(given, 2)), 1) + tf.reduce_sum(terms, 1)
        return uses.never_cancelled(norms, masses)

    def joined_with(self, others: Sequence["Tied"]) -> "Tied":
        """All calls of the layer as one use."""
        parts, names = [self, *others], ("row_ids", "valid", *self.float_fields)
        whole = {name: tf.concat([getattr(part, name) for part in parts], 1) for name in names}
        return dataclasses.replace(self, **whole)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, float64 `[rows, width]`."""
        slots = tf.where(self.valid, tf.cast(self.row_ids, tf.int32), -1)
        looked_up = Rows(self.row_ids, self.valid, self.row_cotangents, slots)
        product = Product(self.logit_cotangents, self.hidden)
        return looked_up.clipped_sum(factors, self.num_rows) + uses.exact(
            product.clipped_sum(factors)
        )

    def _of_rows_looked_up(self, given: tf.Tensor) -> tf.Tensor:
        """Each example's distinct rows, one slot each."""
        at_rows = tf.gather(self.logit_cotangents, self.row_ids, axis=2, batch_dims=1)
        as_output = tf.matmul(at_rows, self.hidden, transpose_a=True)  # [batch, lookups, width]
        batch, lookups = tf.shape(self.row_ids)[0], tf.shape(self.row_ids)[1]
        example = tf.repeat(tf.range(batch, dtype=tf.int64), lookups)
        pairs = example * self.num_rows + tf.reshape(self.row_ids, [-1])
        distinct, slot = tf.unique(tf.where(tf.reshape(self.valid, [-1]), pairs, -1))
        sums = tf.math.unsorted_segment_sum(uses.exact(uses.flat(given)), slot, tf.size(distinct))
        same = tf.math.unsorted_segment_max(uses.flat(as_output), slot, tf.size(distinct))
        squared = tf.reduce_sum(tf.square(sums + uses.exact(same)), axis=1)
        squared *= uses.exact(distinct >= 0)
        norms = tf.math.unsorted_segment_sum(squared, distinct // self.num_rows, batch)
        return tf.cast(norms, tf.float32)

    def _of_other_rows(self) -> tf.Tensor:
        """‖RᵀH‖² over the rows that an example did not look up, a chunk of rows at a time."""
        width = self.hidden.shape[2]
        chunk = max(1, uses.CHUNK_ENTRIES // width)
        others = self._not_looked_up()
        norms = tf.zeros(tf.shape(others)[:1])
        for start in range(0, self.num_rows, chunk):
            with tf.control_dependencies([norms]):  # one chunk in memory at a time
                cotangents = self.logit_cotangents[:, :, start : start + chunk]
                part = tf.matmul(cotangents, self.hidden, transpose_a=True)
                squares = uses.squares(part, 2) * others[:, start : start + chunk]
                norms += tf.reduce_sum(squares, axis=1)
        return norms

    def _not_looked_up(self) -> tf.Tensor:
        """1 or 0, float32 `[batch, rows]`."""
        batch = tf.shape(self.row_ids, tf.int64)[0]
        example = tf.broadcast_to(tf.range(batch)[:, tf.newaxis], tf.shape(self.row_ids))
        pairs = tf.boolean_mask(tf.stack([example, self.row_ids], axis=-1), self.valid)
        ones = tf.ones(tf.shape(pairs)[:1])
        counts = tf.scatter_nd(pairs, ones, tf.stack([batch, self.num_rows]))
        return tf.cast(tf.equal(counts, 0), tf.float32)
