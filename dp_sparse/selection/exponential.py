"""The k rows with the largest noisy scores, of all rows, without a number for each of them.

Adding Gumbel(C3 / ε0) noise to every score and taking the k largest is the same as k exponential
mechanisms in a row, without replacement (Durfee and Rogers 2019). A row that scores gets its own
noise; of the m others only the largest noise matters: `−log X` is a Gumbel variable if X is
exponential, and the k smallest of m exponentials are running sums of `E_j / (m − j + 1)`. Which of
the m rows they belong to is uniform. Time and memory O(lookups + k).
"""

import functools
import math

import numpy as np
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import PrivacyError, grouped, lower_bound, require, xla
from dp_sparse.selection.contribution import RowScores
from dp_sparse.selection.step_rows import rows_by_table

_NOWHERE = 2**62  # beyond all rows
_PLENTY = 8  # rows to draw from for each wanted one, so that few draws are repetitions


def select_top_rows(scores: RowScores, count: int, scale: float, draw: noise.Draw) -> tf.Tensor:
    """The selected rows, int64 `[min(count, rows)]`, sorted, numbered through over all tables.

    Args:
        scores: The batch's scores, of sensitivity C3.
        count: k.
        scale: C3 / ε0 of the noise.
        draw: The step's random streams.

    ### Formal Guarantees
    k exponential mechanisms, each (ε0, 0)-private: scores move in one direction only. Uniforms end
    at 2⁻⁵⁴, which moves the probability of any set of rows by less than 10⁻¹⁵ for each row.
    """
    total, size = int(scores.offsets[-1]), tf.size(scores.row_ids)
    count, scored = min(count, total), scores.row_ids < total
    others = total - tf.math.count_nonzero(scored)
    of_scored = -tf.math.log(_exponential(draw, noise.Purpose.CONTRIBUTION, size))
    of_others = -tf.math.log(_smallest_exponentials(draw, others, count))
    noisy = tf.where(scored, scores.values + scale * of_scored, -math.inf)
    places = tf.math.top_k(tf.concat([noisy, scale * of_others], 0), count, sorted=False).indices
    ranks = _distinct(draw, others, count, _bounds(scores))
    not_scored = _outside(tf.where(scored, scores.row_ids, _NOWHERE), ranks)
    return tf.sort(tf.gather(tf.concat([scores.row_ids, not_scored], 0), places))


def _bounds(scores: RowScores) -> range:
    """The least and the most rows there may be without a score; the first may be unknown."""
    total = int(scores.offsets[-1])
    return range(max(0, total - (scores.row_ids.shape[0] or total)), total + 1)


def _exponential(draw: noise.Draw, purpose: int, count: tf.Tensor | int) -> tf.Tensor:
    return -tf.math.log(noise.uniform(draw, purpose, count))


def _smallest_exponentials(draw: noise.Draw, total: tf.Tensor, count: int) -> tf.Tensor:
    """The `count` smallest of `total` exponential variables, increasing, float64 `[count]`.

    Where there are fewer, the rest are infinite.
    """
    gaps = _exponential(draw, noise.Purpose.SKIPS, count)
    left = total - tf.range(count, dtype=tf.int64)
    sums = tf.cumsum(gaps / tf.cast(tf.maximum(left, 1), tf.float64))
    return tf.where(left > 0, sums, math.inf)


def _distinct(draw: noise.Draw, total: tf.Tensor, count: int, bounds: range) -> tf.Tensor:
    """`count` distinct numbers below `total` in uniformly random order, int64 `[count]`.

    Where there are fewer, the rest are any.

    Args:
        draw: The step's random streams.
        total: int64 scalar.
        count: How many.
        bounds: Of `total`, for XLA, which must know how much room either way takes.
    """
    if xla.static_shapes():
        few = bounds[0] < _PLENTY * count  # then repetitions are many, and `total` is small
        return _shuffled(draw, total, bounds[-1], count) if few else _first(draw, total, count)
    few = tf.constant(_PLENTY * count, tf.int64) > total
    shuffled = functools.partial(_shuffled, draw, total, tf.cast(total, tf.int32), count)
    return tf.cond(few, shuffled, functools.partial(_first, draw, total, count))


def _shuffled(draw: noise.Draw, total: tf.Tensor, room: tf.Tensor | int, count: int) -> tf.Tensor:
    """The first `count` of `total` shuffled numbers; `room` is at least `total`. O(room log)."""
    uniforms = noise.uniform(draw, noise.Purpose.PICKS, room)
    there = tf.range(room, dtype=tf.int64) < total
    order = tf.argsort(tf.where(there, uniforms, math.inf))
    order = tf.concat([order, tf.zeros([count], tf.int32)], 0)
    return tf.cast(order[:count], tf.int64)


def _first(draw: noise.Draw, total: tf.Tensor, count: int) -> tf.Tensor:
    """The first `count` different ones of uniform numbers, of which one in eight may be repeated.

    Fails if 2 · count + 32 do not hold so many: less than once in 10²⁸ steps, since a number is new
    with probability 7/8 or more while some are wanted.
    """
    uniforms = noise.uniform(draw, noise.Purpose.PICKS, 2 * count + 32)
    numbers = tf.cast(uniforms * tf.cast(total, tf.float64), tf.int64)
    numbers = tf.minimum(numbers, total - 1)  # a uniform rounds to 1 once in 2⁵³
    groups, place = grouped(numbers, _NOWHERE), tf.range(tf.size(numbers))
    first = tf.math.unsorted_segment_min(place, groups.places, tf.size(groups.values))
    new = tf.equal(tf.gather(first, groups.places), place)
    enough = require(
        tf.math.count_nonzero(new) >= count,
        PrivacyError,
        "A step drew too few different rows, which happens once in 10^28 steps. Nothing was "
        "released; go on from the last checkpoint.",
    )
    with tf.control_dependencies([enough]):
        order = tf.argsort(tf.where(new, place, tf.size(place)), stable=True)
    return tf.gather(numbers, order[:count])


def _outside(row_ids: tf.Tensor, ranks: tf.Tensor) -> tf.Tensor:
    """The rows of these ranks among all that are none of `row_ids`, which are sorted."""
    skipped = row_ids - tf.range(tf.size(row_ids, tf.int64))  # others below each of them
    return ranks + tf.cast(lower_bound(skipped, ranks + 1), tf.int64)


def selected_by_table(rows: tf.Tensor, offsets: np.ndarray) -> list[tf.Tensor]:
    """Sorted rows numbered through, as each table's own, int64."""
    starts = lower_bound(rows, tf.constant(offsets, tf.int64))
    rooms = [rows.shape[0]] * (len(offsets) - 1)
    return rows_by_table(rows, starts, offsets, rooms)
