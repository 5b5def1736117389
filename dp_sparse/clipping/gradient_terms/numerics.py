"""Sums of squares that never come out too small, and sums that float32 would not hold.

Sums over a batch are float64, so that one example cannot move how others are rounded by more than
it is allowed to move the sum; but matrix products, which are float32 (`docs/guarantees.md`).
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dp_sparse.core import xla

PART_ENTRIES = 2**20  # of gradients of several examples that are only needed for their norms
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def squares(values: tf.Tensor, start: int = 1) -> tf.Tensor:
    """Sums of squares over the axes from `start` on, never below the true ones.

    A square below float32's smallest normal number is flushed to 0, so each entry adds that number:
    otherwise tiny inputs times huge cotangents would pass for a gradient of norm 0.
    """
    axes = list(range(start, values.shape.rank))
    entries = values.shape[start:].num_elements()
    count = tf.reduce_prod(tf.shape(values)[start:]) if entries is None else entries
    floor = tf.cast(count, tf.float32) * _SMALLEST_NORMAL
    if xla.static_shapes():  # which fuses this, has no kernel for norms, adds float32 in a row
        return tf.cast(tf.reduce_sum(tf.square(exact(values)), axis=axes), tf.float32) + floor
    return tf.square(tf.math.reduce_euclidean_norm(values, axis=axes)) + floor


def never_cancelled(squared_norms: tf.Tensor, masses: tf.Tensor) -> tf.Tensor:
    """Squared norms, float32, at least (mass / 1000)² of the example's terms, Σ of their norms.

    Terms that cancel leave a norm that float32 cannot tell from 0, or below it; their clipped terms
    would still swamp the batch's sum. The floor keeps every example's terms within 1000·C, and
    touches no example whose gradient is more than a thousandth of its terms.
    """
    return tf.cast(tf.maximum(squared_norms, tf.square(masses / 1000.0)), tf.float32)


def exact(values: tf.Tensor) -> tf.Tensor:
    """Values in float64, in which their sums are exact for all that privacy asks."""
    return tf.cast(values, tf.float64)


def expanded(factors: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """`factors` `[batch]` with as many axes as `values`."""
    return tf.reshape(factors, [-1] + [1] * (values.shape.rank - 1))


def flat(values: tf.Tensor) -> tf.Tensor:
    """`[batch, positions, width]` as `[batch · positions, width]`."""
    return tf.reshape(values, [-1, values.shape[-1]])


def part_of(values: tf.Tensor, begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`size` examples from `begin` on."""
    rest = values.shape.rank - 1
    return tf.slice(values, tf.stack([begin, *[0] * rest]), tf.stack([size, *[-1] * rest]))


def by_part(
    batch: tf.Tensor, entries: int, of_part: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """What `of_part` makes of so many examples (2nd argument) from the 1st on, in one piece.

    All parts have one size, so the last one may begin before the one before it ends.

    Args:
        batch: How many examples there are, int32 scalar.
        entries: How many numbers each of them takes; a part has 2²⁰, or one example.
        of_part: Its result is float32 `[examples of the part]`.
    """
    size = tf.minimum(max(1, PART_ENTRIES // entries), batch)
    count = tf.maximum(-(-batch // tf.maximum(size, 1)), 1)  # an empty batch is one empty part

    def add_part(index: tf.Tensor, parts: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        begin = tf.minimum(index * size, batch - size)
        return index + 1, parts.write(index, of_part(begin, size))

    parts = tf.TensorArray(tf.float32, count, element_shape=[None])
    _, parts = tf.while_loop(
        lambda index, _: index < count, add_part, (tf.constant(0), parts), parallel_iterations=1
    )
    found = tf.reshape(parts.stack(), [count * size])
    before = (count - 1) * size
    return tf.concat([found[:before], found[tf.size(found) - (batch - before) :]], 0)
