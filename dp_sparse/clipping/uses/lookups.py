"""Lookups of rows: norms of what an example adds to each row, and sums on the rows chosen."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from dp_sparse.clipping.uses.numerics import (
    exact,
    flat,
    never_cancelled,
    squares,
)
from dp_sparse.core import grouped, xla


@dataclasses.dataclass(frozen=True)
class Rows:
    """Lookups in a table.

    Attributes:
        row_ids: int64 `[batch, lookups]`.
        valid: bool `[batch, lookups]`: false for masked lookups, which do not train their row.
        cotangents: ∂L/∂(looked-up rows), float32 `[batch, lookups, width]`.
        places: int32 `[batch, lookups]`: which of the step's rows a lookup belongs to, -1 for none;
            set by `restricted`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("cotangents",)
    holds_gradients: ClassVar[bool] = False
    row_ids: tf.Tensor
    valid: tf.Tensor
    cotangents: tf.Tensor
    places: tf.Tensor | None = None

    def restricted(self, places: tf.Tensor) -> "Rows":
        """These lookups without those of unchosen rows (place -1) and masked ones."""
        return dataclasses.replace(self, places=tf.where(self.valid, places, -1))

    def squared_norms(self) -> tf.Tensor:
        """Σ over the distinct chosen rows of an example of ‖Σ of its cotangents for that row‖².

        Costs O(lookups · width).
        """
        chosen = tf.cast(self.valid if self.places is None else self.places >= 0, tf.float32)
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

    def clipped_sum(self, factors: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i on the step's rows, float64 `[num_rows, width]`; place -1 is dropped."""
        places, cotangents = tf.reshape(self.places, [-1]), flat(self.cotangents)
        if self.row_ids.shape[1] != 1:
            factors = tf.repeat(factors, tf.shape(self.places)[1])
        if not xla.static_shapes():  # most lookups may be of rows that were not chosen
            chosen = tf.where(places >= 0)[:, 0]
            places, cotangents, factors = (
                tf.gather(each, chosen) for each in (places, cotangents, factors)
            )
        scaled = exact(cotangents * factors[:, tf.newaxis])
        return tf.math.unsorted_segment_sum(scaled, places, num_rows)

    def joined_with(self, others: Sequence["Rows"]) -> "Rows":
        """The lookups of all of them, none restricted yet."""
        names = ("row_ids", "valid", "cotangents")
        parts = [[getattr(use, name) for use in (self, *others)] for name in names]
        return Rows(*(tf.concat(part, axis=1) for part in parts))
