"""The k rows with the largest noisy scores, of all rows, without a number for each of them.

Adding Gumbel(C3 / ε0) noise to every score and taking the k largest is the same as k exponential
mechanisms in a row, without replacement (Durfee and Rogers 2019). A row that scores gets its own
noise; of the m others only the largest noise matters: `−log X` is a Gumbel variable if X is
exponential, and the k smallest of m exponentials are running sums of `E_j / (m − j + 1)`. Which of
the m rows they belong to is uniform. Time and memory O(lookups + k).
"""

import numpy as np
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.selection.scores import RowScores

_SPARE = 1.5  # draws for each wanted row, of which at most half may be repetitions


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
    total = int(scores.offsets[-1])
    count = min(count, total)
    size = tf.size(scores.row_ids)
    others = total - tf.cast(size, tf.int64)
    of_scored = -tf.math.log(_exponential(draw, noise.Purpose.CONTRIBUTION, size))
    wanted = tf.cast(tf.minimum(others, count), tf.int32)
    of_others = -tf.math.log(_smallest_exponentials(draw, others, wanted))
    noisy = tf.concat([scores.values + scale * of_scored, scale * of_others], 0)
    places = tf.math.top_k(noisy, count, sorted=False).indices
    ranks = _distinct(draw, others, wanted)
    rows = tf.concat([scores.row_ids, _outside(scores.row_ids, ranks)], 0)
    return tf.sort(tf.gather(rows, places))


def _exponential(draw: noise.Draw, purpose: int, count: tf.Tensor) -> tf.Tensor:
    return -tf.math.log(noise.uniform(draw, purpose, count))


def _smallest_exponentials(draw: noise.Draw, total: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The `count` smallest of `total` exponential variables, increasing, float64 `[count]`."""
    gaps = _exponential(draw, noise.Purpose.SKIPS, count)
    return tf.cumsum(gaps / tf.cast(total - tf.range(count, dtype=tf.int64), tf.float64))


def _distinct(draw: noise.Draw, total: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """`count` distinct numbers below `total` in uniformly random order, int64 `[count]`."""

    def shuffled() -> tf.Tensor:
        return tf.argsort(noise.uniform(draw, noise.Purpose.PICKS, tf.cast(total, tf.int32)))

    def drawn() -> tf.Tensor:
        chunk = 16 + 2 * tf.cast(tf.math.ceil(_SPARE / 2 * tf.cast(count, tf.float64)), tf.int32)

        def extend(found: tf.Tensor, offset: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            uniforms = noise.uniform(draw, noise.Purpose.PICKS, chunk, offset)
            more = tf.cast(uniforms * tf.cast(total, tf.float64), tf.int64)
            more = tf.minimum(more, total - 1)  # a uniform rounds to 1 once in 2⁵³
            return tf.unique(tf.concat([found, more], 0))[0], offset + chunk

        found, _ = tf.while_loop(
            lambda found, _: tf.size(found) < count,
            extend,
            (tf.zeros([0], tf.int64), tf.zeros([], tf.int32)),
            shape_invariants=(tf.TensorShape([None]), tf.TensorShape([])),
        )
        return found[:count]

    few = tf.cast(count, tf.int64) * 2 > total  # then repetitions are many, and `total` is small
    return tf.cond(few, lambda: tf.cast(shuffled()[:count], tf.int64), drawn)


def _outside(row_ids: tf.Tensor, ranks: tf.Tensor) -> tf.Tensor:
    """The rows of these ranks among all that are none of `row_ids`, which are sorted."""
    skipped = row_ids - tf.range(tf.size(row_ids, tf.int64))  # others below each of them
    return ranks + tf.cast(tf.searchsorted(skipped, ranks, side="right"), tf.int64)


def by_table(rows: tf.Tensor, offsets: np.ndarray) -> list[tf.Tensor]:
    """Sorted rows numbered through, as each table's own, int64."""
    starts = tf.searchsorted(rows, tf.constant(offsets, tf.int64))
    parts = tf.split(rows, starts[1:] - starts[:-1], num=len(offsets) - 1)
    return [part - int(first) for part, first in zip(parts, offsets[:-1], strict=True)]
