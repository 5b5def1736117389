"""Geometric skips: the successes of c independent trials of probability p.

Found without looking at the c trials. The gap to the next success is geometric; gaps come from
float64 uniforms (k + ½)·2⁻⁵³ by `log1p(-p)` (float32 would cut the tail at 16.6 mean gaps). Time
and memory O(c·p), so flat in c for a fixed expected number of successes. c up to 10⁹ and beyond, in
int64.
"""

import math

import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import PrivacyError, require, seldom, xla


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
    hits = tf.cond(unfinished(*first), seldom(extended), lambda: tf.identity(first[0]))
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
