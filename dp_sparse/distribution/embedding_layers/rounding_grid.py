"""The grid to which gradients and noise of rows are rounded, so that float32 adds them exactly.

The embedding layer itself adds clipped gradients and noise. If only the noise were rounded, or
neither, the low bits of a row would tell whether an example is in the sum (Mironov 2012). The grid
has the multiples of a power of two that is so coarse that every sum is below 2^24 of it. Then sums
in float32 are exact.

### Formal Guarantees
Gradients are rounded to the grid at random, by less than one step an entry. Examples are clipped to
so much less than C that they are within C when rounded. Rounded noise plus a point of the grid is
the rounded sum: what is released is a post-processing of the Gaussian mechanism with sensitivity C.

Off TPU, `RowUpdates` makes the updates that a TPU makes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dp_sparse.optimizers import adagrad_rows, sgd_rows

_EXACT = 2.0**24  # float32 has all integers up to this
_RANGE = 10.0  # deviations; the package's normals end at 9.2
_FINEST = 2.0**-16  # of a deviation; ten values of 64 bits reach each point up to 7.6 deviations


@dataclasses.dataclass(frozen=True)
class RoundingGrid:
    """The grid for sums over a batch, divided by its expected size.

    Raises:
        ValueError: Rounding would cost a quarter of `clip_norm` or more.

    Attributes:
        clip_norm: C.
        deviation: The standard deviation of the noise of a sum, C·σ2.
        batch: The expected batch size.
        examples: The most examples of a batch, padding included.
        slack: How far rounding can move all rows of an example together: in L2, in steps.
    """

    clip_norm: float
    deviation: float
    batch: float
    examples: int
    slack: float

    def __post_init__(self) -> None:
        if self.rounding_share >= 0.25:
            raise ValueError(
                f"Expected fewer ids or smaller batches, got {self.examples} examples: "
                f"sums exact in float32 would cost {self.rounding_share:.0%} of clip_norm. Use "
                "keras.layers.Embedding, whose sums are float64."
            )

    @property
    def step(self) -> float:
        """The step of the grid: a power of two, in units of a mean over the batch."""
        largest = (self.examples * self.clip_norm + _RANGE * self.deviation) / self.batch
        finest = self.deviation / self.batch * _FINEST
        return float(2.0 ** math.ceil(math.log2(max(largest / _EXACT, finest))))

    @property
    def rounding_share(self) -> float:
        """The part of C that is kept for rounding."""
        return 1.01 * self.slack * self.step * self.batch / self.clip_norm

    @property
    def clip_norm_before_rounding(self) -> float:
        """The norm to which examples are clipped, so that they are within C when rounded."""
        return self.clip_norm * (1 - self.rounding_share)

    def noise(self, normals: tf.Tensor) -> tf.Tensor:
        """Noise of a mean from standard normals, float64; float32 points of the grid."""
        scaled = normals * (self.deviation / self.batch / self.step)
        return tf.cast(tf.round(scaled) * self.step, tf.float32)

    def rounded(self, gradients: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Random points of the grid whose expectations are `gradients`; `seed` is int32 `[2]`."""
        steps = gradients / self.step
        below = tf.floor(steps)
        up = tf.random.stateless_uniform(tf.shape(gradients), seed) < steps - below
        return (below + tf.cast(up, tf.float32)) * self.step


class RowUpdates(tf.Module):
    """Updates tables off TPU as a TPU does: each row once, by the sum of its gradients.

    Args:
        optimizer: That of the tables: `tf.tpu.experimental.embedding.SGD` or `Adagrad`.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._slots: list[tf.Variable] = []  # Adagrad's, one for each table

    def apply(self, tables: Sequence[tf.Variable], gradients: Sequence[tf.IndexedSlices]) -> None:
        """Updates tables by their gradients, whose rows may repeat. O(rows · width)."""
        if isinstance(self._optimizer, tf.tpu.experimental.embedding.Adagrad) and not self._slots:
            with tf.init_scope():
                start = self._optimizer.initial_accumulator_value
                made = [tf.Variable(tf.fill(t.shape, start), trainable=False) for t in tables]
            self._slots.extend(made)
        rate = tf.cast(self._optimizer.learning_rate(), tf.float32)
        for index, (table, gradient) in enumerate(zip(tables, gradients, strict=True)):
            rows = _changed(summed_rows(gradient))
            if isinstance(self._optimizer, tf.tpu.experimental.embedding.SGD):
                sgd_rows(table, rows, rate)
            else:
                adagrad_rows(table, self._slots[index], rows, rate, epsilon=0.0)


def summed_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once, summed in float64."""
    rows, places = tf.unique(tf.reshape(tf.cast(gradient.indices, tf.int64), [-1]))
    values = tf.reshape(gradient.values, [-1, tf.shape(gradient.values)[-1]])
    sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), places, tf.size(rows))
    return tf.IndexedSlices(tf.cast(sums, tf.float32), rows, gradient.dense_shape)


def _changed(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The gradient without rows that are 0: writing a row would flush its denormal numbers."""
    there = tf.reduce_any(tf.not_equal(gradient.values, 0), axis=1)
    rows, values = (tf.boolean_mask(part, there) for part in (gradient.indices, gradient.values))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
