"""The rows that a batch looked up, as a choice of rows; what DP-SGD sums gradients on."""

import tensorflow as tf

from dp_sparse.groups import grouped
from dp_sparse.optimizers.sums import RowChoice
from dp_sparse.selection.contribution import TableLookups


def looked_up_rows(table: TableLookups) -> RowChoice:
    """All of them, sorted. O(lookups · log lookups)."""
    groups = grouped(tf.reshape(table.row_ids, [-1]), table.num_rows)
    row_ids, position = groups.values, groups.places
    order = tf.argsort(row_ids)
    slots = tf.gather(tf.math.invert_permutation(order), position)
    return RowChoice(tf.gather(row_ids, order), tf.reshape(slots, tf.shape(table.row_ids)))
