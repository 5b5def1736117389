"""The rows of one table that a step may touch; of DP-SGD those that its batch looked up."""

import dataclasses

import tensorflow as tf

from dp_sparse.core import grouped
from dp_sparse.selection.contribution import TableLookups


@dataclasses.dataclass(frozen=True)
class StepRows:
    """The rows of one table that a step may touch.

    Attributes:
        row_ids: int64 `[rows]`, unique and sorted; under XLA filled up with the table's number of
            rows.
        places: int32 `[batch, lookups]`: where in `row_ids` each lookup's row stands, -1 for a row
            not chosen.
    """

    row_ids: tf.Tensor
    places: tf.Tensor


def looked_up_rows(table: TableLookups) -> StepRows:
    """All of them, sorted. O(lookups · log lookups)."""
    groups = grouped(tf.reshape(table.row_ids, [-1]), table.num_rows)
    row_ids, position = groups.values, groups.places
    order = tf.argsort(row_ids)
    places = tf.gather(tf.math.invert_permutation(order), position)
    return StepRows(tf.gather(row_ids, order), tf.reshape(places, tf.shape(table.row_ids)))
