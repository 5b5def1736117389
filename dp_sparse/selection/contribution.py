"""The clipped contribution map of a batch, as unique (row, value) pairs.

This is DP-AdaFEST, Algorithm 1, lines 6-8.

Example i contributes `v_i ∈ {0,1}^c`, the presence (not the count) of each embedding row over all
tables at once, clipped to `C1` in L2. With n_i distinct rows it adds min(1, C1/√n_i) to each of
them. Time and memory O(lookups), whatever c is.

### Formal Guarantees
Adding, removing or zeroing out one example moves the map by at most `C1` in L2: shares are rounded
down to whole units and summed as integers, so this holds to the last bit. Padding examples (weight
0) and masked lookups contribute nothing.

Exponential selection scores rows by the norms of their gradients, as unique (row, score) pairs.

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
import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dp_sparse.core import grouped

_UNITS = 2**32  # of the largest share, and of C3; sums of `_FEW` examples are exact in float64
_FEW = 2**21
_EXACT_BITS = 53  # of float64
_NOBODY = 2**62  # the (example, row) pair of lookups that do not count


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
        units: int64 `[unique]`: `values` as whole units of `unit_of`, whose sums over steps are
            exact.
    """

    offsets: np.ndarray
    row_ids: tf.Tensor
    values: tf.Tensor
    places: tf.Tensor
    widths: list[int | tf.Tensor]
    units: tf.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """c, the rows of all tables together."""
        return int(self.offsets[-1])


def unit_of(clip_norm: float, examples: int = _FEW) -> float:
    """The unit of shares: so large that sums over `examples` shares are exact in float64.

    Args:
        clip_norm: C1.
        examples: The most shares that are added up, those of an example in each of its batches.
    """
    units = 2 ** (_EXACT_BITS - math.ceil(math.log2(examples))) if examples > _FEW else _UNITS
    return min(1.0, clip_norm) / units


def contribution_map(
    tables: Sequence[TableLookups], clip_norm: float, examples: int = _FEW
) -> ContributionMap:
    """The map of one batch.

    Args:
        tables: The batch's lookups, the same batch for all tables.
        clip_norm: C1.
        examples: As `unit_of` takes it.
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
    unit = unit_of(clip_norm, examples)
    share = tf.minimum(clip_norm / tf.sqrt(tf.cast(tf.maximum(distinct, 1), tf.float64)), 1.0)
    units = tf.reshape(present * tf.cast(tf.floor(share / unit), tf.int64), [-1])
    sums = tf.raw_ops.DenseBincount(input=position, size=tf.size(unique), weights=units)
    return ContributionMap(
        offsets,
        tf.cast(unique, tf.int64),
        unit * tf.cast(sums, tf.float64),
        tf.reshape(position, tf.shape(rows)),
        [_width(table) for table in tables],
        sums,
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
    """The (example, row) pairs: example, row numbered through, norm of the summed cotangents.

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
