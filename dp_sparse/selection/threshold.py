"""DP-AdaFEST's selection: rows whose noisy contribution reaches a threshold.

This is Algorithm 1, line 8, and B.2 corrected.

A row that the batch looked up gets its own Gaussian draw; each of the others survives independently
with `p0 = Ψ(τ / (σ1·C1))`, found by geometric skips over all c rows (the paper prints σ1²·C1²,
which breaks privacy when σ1·C1 < 1). A skip that lands on a looked-up row is discarded: exact,
since that row had its own draw. No tensor of size c exists; the cost is O(lookups + false rows).

Geometric skips are the successes of c independent trials of probability p.

Found without looking at the c trials. The gap to the next success is geometric; gaps come from
float64 uniforms (k + ½)·2⁻⁵³ by `log1p(-p)` (float32 would cut the tail at 16.6 mean gaps). Time
and memory O(c·p), so flat in c for a fixed expected number of successes. c up to 10⁹ and beyond, in
int64.
"""

import dataclasses
import math

import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import survival_probability
from dp_sparse.core import PrivacyError, lower_bound, rare_branch, require, xla
from dp_sparse.selection.contribution import ContributionMap


def geometric_skips(draw: noise.Draw, num_trials: int, probability: float) -> tf.Tensor:
    """Indices of the successes, int64 `[hits]`, increasing; under XLA filled up with c.

    Args:
        draw: The step's random streams; `Purpose.SKIPS` is used up.
        num_trials: c, fixed when the graph is built.
        probability: p in [0, 1], fixed when the graph is built.
    """
    chunk = most_skips(num_trials, probability)
    if xla.static_shapes():
        return _one_chunk(draw, chunk, num_trials, probability)

    def extend(hits: tf.Tensor, drawn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        gaps = _gaps(
            noise.uniform(draw, noise.Purpose.SKIPS, chunk, drawn), probability, num_trials
        )
        last = tf.concat([tf.constant([-1], tf.int64), hits], 0)[-1]
        return tf.concat([hits, last + tf.cumsum(gaps)], 0), drawn + chunk

    def unfinished(hits: tf.Tensor, drawn: tf.Tensor) -> tf.Tensor:
        return hits[-1] < num_trials

    def extended() -> tf.Tensor:
        shapes = (tf.TensorShape([None]), tf.TensorShape([]))
        return tf.while_loop(unfinished, extend, first, shape_invariants=shapes)[0]

    first = extend(tf.zeros([0], tf.int64), tf.zeros([], tf.int64))
    hits = tf.cond(unfinished(*first), rare_branch(extended), lambda: tf.identity(first[0]))
    return tf.boolean_mask(hits, hits < num_trials)


def _one_chunk(draw: noise.Draw, chunk: int, num_trials: int, probability: float) -> tf.Tensor:
    """`[chunk]`, filled up with `num_trials`; fails if that many gaps do not reach the end."""
    gaps = _gaps(noise.uniform(draw, noise.Purpose.SKIPS, chunk), probability, num_trials)
    hits = tf.cumsum(gaps) - 1
    overflow = require(
        hits[-1] >= num_trials,
        PrivacyError,
        f"More rows than the {chunk} that XLA was given room for survived on noise alone, which "
        "happens once in 10^13 steps. Nothing was released; go on from the last checkpoint.",
    )
    with tf.control_dependencies([overflow]):
        return tf.minimum(hits, num_trials)


def most_skips(num_trials: int, probability: float) -> int:
    """Gaps to draw at once: enough for all but e⁻³⁰ of the steps.

    Even, as a Philox block holds two.
    """
    expected = num_trials * probability
    return 2 * math.ceil((expected + 8 * math.sqrt(expected) + 24) / 2)


def _gaps(uniforms: tf.Tensor, probability: float, num_trials: int) -> tf.Tensor:
    """Geometric gaps in [1, num_trials + 1], int64: P[gap > k] = (1 - p)^k."""
    rate = math.log1p(-probability) if probability < 1 else -math.inf
    if rate == 0:
        return tf.fill(tf.shape(uniforms), tf.constant(num_trials + 1, tf.int64))
    skipped = tf.floor(tf.math.log(uniforms) / rate)
    return 1 + tf.cast(tf.minimum(skipped, float(num_trials)), tf.int64)


@dataclasses.dataclass(frozen=True)
class Survivors:
    """The rows a step updates, over all tables.

    Attributes:
        row_ids: int64 `[rows]`, unique and sorted, numbered through over the tables.
        places: int32 `[unique]`: where in `row_ids` each row of the contribution map stands, -1 for
            one that fell.
        starts: int64 `[tables + 1]`: the rows of table t are `row_ids[starts[t]:starts[t + 1]]`.
    """

    row_ids: tf.Tensor
    places: tf.Tensor
    starts: tf.Tensor


def select_rows(
    contributions: ContributionMap, threshold: float, deviation: float, draw: noise.Draw
) -> Survivors:
    """Rows `{j : V[j] ≥ τ}` with `V = map + N(0, s²)`, sampled without a vector of size c.

    Args:
        contributions: The batch's clipped map, of sensitivity C1.
        threshold: τ, in units of the map.
        deviation: s = σ1·C1.
        draw: The step's random streams.

    ### Formal Guarantees
    The survivors are a post-processing of the Gaussian mechanism of noise multiplier σ1 on the map,
    all rows included.
    """
    values = contributions.values
    noisy = values + deviation * noise.normal(draw, noise.Purpose.CONTRIBUTION, tf.size(values))
    survived = noisy >= threshold
    probability = survival_probability(threshold, deviation)
    hits = geometric_skips(draw, contributions.num_rows, probability)
    return (_merged if xla.static_shapes() else _ordered)(contributions, survived, hits)


def _ordered(contributions: ContributionMap, survived: tf.Tensor, hits: tf.Tensor) -> Survivors:
    """Survivors of both kinds in one sorted list, and where each looked-up row stands in it."""
    looked_up, count = contributions.row_ids, tf.size(contributions.row_ids, tf.int64)
    # Distinct values come in the order of their first: after the rows, hits on none of them.
    false_rows = tf.unique(tf.concat([looked_up, hits], 0))[0][count:]
    true_rows = tf.where(survived)[:, 0]
    row_ids, order = _sorted(tf.concat([tf.gather(looked_up, true_rows), false_rows], 0))
    ranks = tf.math.invert_permutation(order)[: tf.size(true_rows)]
    places = tf.scatter_nd(true_rows[:, tf.newaxis], ranks + 1, count[tf.newaxis]) - 1
    starts = tf.searchsorted(
        row_ids, tf.constant(contributions.offsets, tf.int64), out_type=tf.int64
    )
    return Survivors(row_ids, places, starts)


def _sorted(keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Integers in increasing order, and the place in `keys` of each."""
    values, order = tf.math.top_k(-keys, tf.size(keys))
    return -values, order


def _merged(contributions: ContributionMap, survived: tf.Tensor, hits: tf.Tensor) -> Survivors:
    """The same with static shapes, from sorted rows and hits; what is left over is c.

    Where two sorted lists are merged, an entry's place is its rank in its own list and the number
    of entries of the other below it.
    """
    rows, nowhere = contributions.row_ids, contributions.num_rows
    survived &= rows < nowhere
    row_of_hit, hit_of_row = lower_bound(rows, hits), lower_bound(hits, rows)
    padded = tf.concat([rows, tf.constant([-1], tf.int64)], 0)
    looked_up = tf.equal(tf.gather(padded, row_of_hit), hits)
    kept = (hits < nowhere) & ~looked_up
    survivors_before, kept_before = _before(survived), _before(kept)
    places = survivors_before[:-1] + tf.gather(kept_before, hit_of_row)
    places = tf.where(survived, places, -1)
    places_of_hits = kept_before[:-1] + tf.gather(survivors_before, row_of_hit)
    capacity = rows.shape[0] + hits.shape[0]
    at = tf.concat([places, tf.where(kept, places_of_hits, -1)], 0)
    at = tf.where(at >= 0, at, capacity)[:, tf.newaxis]  # the last entry takes what fell
    row_ids = tf.fill([capacity + 1], tf.constant(nowhere, tf.int64))
    row_ids = tf.tensor_scatter_nd_update(row_ids, at, tf.concat([rows, hits], 0))[:capacity]
    starts = lower_bound(row_ids, tf.constant(contributions.offsets, tf.int64))
    return Survivors(row_ids, places, tf.cast(starts, tf.int64))


def _before(chosen: tf.Tensor) -> tf.Tensor:
    """How many are chosen before each, and in all: int32 `[entries + 1]`."""
    return tf.concat([[0], tf.cumsum(tf.cast(chosen, tf.int32))], 0)
