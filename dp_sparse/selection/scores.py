"""Scores of rows from the norms of their gradients, as unique (row, score) pairs.

This is the baseline of Zhang et al. (2021), [57] of Ghazi et al., NeurIPS 2023. With n_i the norms
of example i's gradient on each row of all tables, row j scores `Σ_i min(1, C3/‖n_i‖∞)·n_i[j]`.
Time and memory O(lookups · width), whatever the size of the tables.

### Formal Guarantees
An example adds to each score a number in [0, C3]: shares are rounded down to whole units and summed
as integers, so adding, removing or zeroing out one example moves all scores in one direction, each
by at most C3, given the norms of the others, whose last bits may depend on the size of the batch.
Padding examples, masked lookups and rows whose norm is not finite add nothing.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dp_sparse.core import grouped
from dp_sparse.selection.contribution import TableLookups

_UNITS = 2**32  # of C3; sums of two million examples are exact in float64
_NOBODY = 2**62  # the (example, row) pair of lookups that do not count


@dataclasses.dataclass(frozen=True)
class RowScores:
    """The batch's scores over the rows of all tables; rows without one score 0.

    Rows are numbered through: table t starts at `offsets[t]`.

    Attributes:
        offsets: First number of each table, and the total at the end.
        row_ids: int64 `[unique]`, sorted: every row looked up by a real example. What does not
            count stands at the end, as the number of all rows, and scores 0.
        values: float64 `[unique]`.
    """

    offsets: np.ndarray
    row_ids: tf.Tensor
    values: tf.Tensor


def row_scores(tables: Sequence[TableLookups], clip_norm: float) -> RowScores:
    """Scores of the rows that a batch looked up.

    Args:
        tables: The lookups, with their cotangents.
        clip_norm: C3 > 0.
    """
    offsets = np.concatenate([[0], np.cumsum([table.num_rows for table in tables])])
    starts, total = offsets[:-1].tolist(), int(offsets[-1])
    parts = [_norms(table, start, total) for table, start in zip(tables, starts, strict=True)]
    examples, rows, norms = (tf.concat(part, 0) for part in zip(*parts, strict=True))
    batch = tf.shape(tables[0].row_ids, tf.int64)[0]
    largest = tf.gather(tf.math.unsorted_segment_max(norms, examples, batch), examples)
    share = norms * tf.minimum(_UNITS / largest, _UNITS / tf.constant(clip_norm, tf.float64))
    units = tf.where(tf.math.is_finite(share), tf.floor(tf.minimum(share, _UNITS)), 0.0)
    groups = grouped(rows, total)
    count = tf.size(groups.values)
    sums = tf.math.unsorted_segment_sum(tf.cast(units, tf.int64), groups.places, count)
    order = tf.argsort(groups.values)
    values = tf.cast(tf.gather(sums, order), tf.float64) * (clip_norm / _UNITS)
    return RowScores(offsets, tf.gather(groups.values, order), values)


def _norms(table: TableLookups, start: int, total: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Of each (example, row) pair: example, row numbered through, norm of the summed cotangents.

    What does not count is row `total` of example 0, of norm 0.
    """
    assert table.cotangents is not None
    examples = tf.range(tf.shape(table.row_ids, tf.int64)[0])[:, tf.newaxis]
    pairs = tf.where(table.valid, examples * table.num_rows + table.row_ids, _NOBODY)
    groups = grouped(tf.reshape(pairs, [-1]), _NOBODY)
    cotangents = tf.where(table.valid[..., tf.newaxis], tf.cast(table.cotangents, tf.float64), 0.0)
    flat = tf.reshape(cotangents, [-1, cotangents.shape[-1]])
    sums = tf.math.unsorted_segment_sum(flat, groups.places, tf.size(groups.values))
    there = groups.values < _NOBODY
    pairs = tf.where(there, groups.values, 0)
    row_ids = tf.where(there, pairs % table.num_rows + start, total)
    return pairs // table.num_rows, row_ids, tf.norm(sums, axis=1)
