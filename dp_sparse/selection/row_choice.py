"""The rows of one table that a step may touch; of DP-SGD those that its batch looked up."""

import dataclasses

import tensorflow as tf

from dp_sparse.core import grouped
from dp_sparse.selection.contribution import TableLookups


@dataclasses.dataclass(frozen=True)
class RowChoice:
    """The rows of one table that a step may touch.

    Attributes:
        row_ids: int64 `[rows]`, unique and sorted; under XLA filled up with the table's number of
            rows.
        slots: int32 `[batch, lookups]`: where in `row_ids` each lookup's row stands, -1 for a row
            not chosen.
    """

    row_ids: tf.Tensor
    slots: tf.Tensor


def looked_up_rows(table: TableLookups) -> RowChoice:
    """All of them, sorted. O(lookups · log lookups)."""
    groups = grouped(tf.reshape(table.row_ids, [-1]), table.num_rows)
    row_ids, position = groups.values, groups.places
    order = tf.argsort(row_ids)
    slots = tf.gather(tf.math.invert_permutation(order), position)
    return RowChoice(tf.gather(row_ids, order), tf.reshape(slots, tf.shape(table.row_ids)))
