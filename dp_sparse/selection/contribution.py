"""The clipped contribution map of a batch, as unique (row, value) pairs.

This is DP-AdaFEST, Algorithm 1, lines 6-8.

Example i contributes `v_i ∈ {0,1}^c`, the presence (not the count) of each embedding row over all
tables at once, clipped to `C1` in L2. With n_i distinct rows it adds min(1, C1/√n_i) to each of
them. Time and memory O(lookups), whatever c is.

### Formal Guarantees
Adding, removing or zeroing out one example moves the map by at most `C1` in L2: shares are rounded
down to whole units and summed as integers, so this holds to the last bit. Padding examples (weight
0) and masked lookups contribute nothing.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dp_sparse.core import grouped

_UNITS = 2**32  # of the largest share; sums of two million examples are exact in float64


@dataclasses.dataclass(frozen=True)
class TableLookups:
    """What a batch looked up in one table.

    Attributes:
        num_rows: Rows of the table.
        row_ids: int64 `[batch, lookups]`, each in [0, num_rows).
        valid: bool `[batch, lookups]`: false for padding examples and masked lookups.
        cotangents: ∂L/∂(looked-up rows), float32 `[batch, lookups, width]`, where they are known
            when rows are chosen.
    """

    num_rows: int
    row_ids: tf.Tensor
    valid: tf.Tensor
    cotangents: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class ContributionMap:
    """The batch's map over the rows of all tables.

    Rows are numbered through: table t starts at `offsets[t]`.

    Attributes:
        offsets: First number of each table, and the total at the end.
        row_ids: int64 `[unique]`: every row looked up at all, valid or not, in no particular order;
            as `Groups.values` under XLA, filled up with c.
        values: float64 `[unique]`: the clipped sum; 0 for rows looked up only by padding.
        places: int32 `[batch, lookups of all tables]`: where in `row_ids` a lookup's row stands.
        widths: How many of the lookups belong to each table.
    """

    offsets: np.ndarray
    row_ids: tf.Tensor
    values: tf.Tensor
    places: tf.Tensor
    widths: list[int | tf.Tensor]

    @property
    def num_rows(self) -> int:
        """c, the rows of all tables together."""
        return int(self.offsets[-1])


def contribution_map(tables: Sequence[TableLookups], clip_norm: float) -> ContributionMap:
    """The map of one batch.

    Args:
        tables: The batch's lookups, the same batch for all tables.
        clip_norm: C1.
    """
    offsets = np.concatenate([[0], np.cumsum([table.num_rows for table in tables], dtype=np.int64)])
    rows = tf.concat([t.row_ids + int(o) for t, o in zip(tables, offsets, strict=False)], axis=1)
    valid = tf.concat([t.valid for t in tables], axis=1)  # [batch, lookups of all tables]
    flat = tf.reshape(rows, [-1])
    groups = grouped(tf.cast(flat, tf.int32) if offsets[-1] < 2**31 else flat, int(offsets[-1]))
    unique, position = groups.values, groups.places
    present = tf.reshape(tf.cast(valid, tf.int64), [-1])
    if any(table.row_ids.shape[1] != 1 for table in tables):
        present *= _first_occurrence(flat, tf.reshape(valid, [-1]), valid, int(offsets[-1]))
    present = tf.reshape(present, tf.shape(rows))
    distinct = tf.reduce_sum(present, axis=1, keepdims=True)  # n_i
    unit = min(1.0, clip_norm) / _UNITS
    share = tf.minimum(clip_norm / tf.sqrt(tf.cast(tf.maximum(distinct, 1), tf.float64)), 1.0)
    units = tf.reshape(present * tf.cast(tf.floor(share / unit), tf.int64), [-1])
    sums = tf.raw_ops.DenseBincount(input=position, size=tf.size(unique), weights=units)
    return ContributionMap(
        offsets,
        tf.cast(unique, tf.int64),
        unit * tf.cast(sums, tf.float64),
        tf.reshape(position, tf.shape(rows)),
        [_width(table) for table in tables],
    )


def _width(table: TableLookups) -> int | tf.Tensor:
    static = table.row_ids.shape[1]
    return tf.shape(table.row_ids)[1] if static is None else static


def _first_occurrence(
    rows: tf.Tensor, valid_flat: tf.Tensor, valid: tf.Tensor, num_rows: int
) -> tf.Tensor:
    """1 for one valid lookup of each (example, row) pair, else 0; int64 `[lookups]`."""
    example = tf.repeat(tf.range(tf.shape(valid, tf.int64)[0]), tf.shape(valid)[1])
    # All invalid lookups share one pair, and none of them counts.
    nowhere = tf.constant(-1, tf.int64)
    pairs = tf.where(valid_flat, example * num_rows + rows, nowhere)
    groups = grouped(pairs, -1)
    lookup = tf.range(tf.size(pairs))
    first = tf.math.unsorted_segment_min(lookup, groups.places, tf.size(groups.values))
    return tf.cast(tf.equal(tf.gather(first, groups.places), lookup), tf.int64)
