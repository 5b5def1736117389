"""Lookups among rows selected beforehand: DP-FEST updates those, DP-AdaFEST+ chooses among them.

Inside a step the rows of a table are numbered by their place in its selection. A lookup of any
other row trains nothing.
"""

import dataclasses

import tensorflow as tf

from dp_sparse.core import lower_bound
from dp_sparse.selection.contribution import TableLookups


@dataclasses.dataclass(frozen=True)
class Restricted:
    """One table's lookups among its selected rows.

    Attributes:
        num_rows: Rows of the whole table.
        selected: int64 `[k]`, sorted: the rows of the selection.
        places: int32 `[batch, lookups]`: where in `selected` each lookup's row stands, -1 if it
            does not.
        valid: bool `[batch, lookups]`: lookups of real examples in selected rows.
    """

    num_rows: int
    selected: tf.Tensor
    places: tf.Tensor
    valid: tf.Tensor

    @property
    def lookups(self) -> TableLookups:
        """The same as lookups in a table of k rows; k > 0."""
        row_ids = tf.cast(tf.maximum(self.places, 0), tf.int64)
        return TableLookups(self.selected.shape[0], row_ids, self.valid)


def restricted(lookups: TableLookups, selected: tf.Tensor) -> Restricted:
    """Finds each lookup's row among `selected`. O(lookups · log k)."""
    row_ids = tf.reshape(lookups.row_ids, [-1])
    place = lower_bound(selected, row_ids)
    padded = tf.concat([selected, tf.constant([-1], tf.int64)], 0)
    found = tf.equal(tf.gather(padded, place), row_ids)
    places = tf.reshape(tf.where(found, place, -1), tf.shape(lookups.row_ids))
    places = tf.ensure_shape(places, lookups.row_ids.shape)
    return Restricted(lookups.num_rows, selected, places, lookups.valid & (places >= 0))
