"""The points on which gradients and noise of rows meet, so that a layer's float32 adds exactly.

The layer sums clipped gradients and noise by itself. Were the noise alone rounded, or neither, the
low bits of a row would tell whether an example is in the sum (Mironov 2012). On the multiples of
one power of two, coarse enough that every sum is below 2^24 of them, float32 is exact.

### Formal Guarantees
Gradients are rounded to the grid at random, by less than a step an entry, and examples are
clipped to so much less than C that they stay within C. Rounded noise plus a point of the grid is
the rounded sum: what is released is a post-processing of the Gaussian mechanism with sensitivity C.
"""

import dataclasses
import math

import tensorflow as tf

_EXACT = 2.0**24  # integers that float32 has
_RANGE = 10.0  # deviations; no normal of ours is beyond 9.1
_FINEST = 2.0**-16  # of the deviation: 64 random bits reach every point up to 7.5 deviations


@dataclasses.dataclass(frozen=True)
class RoundingGrid:
    """For sums over a batch, divided by its expected size.

    Raises:
        ValueError: Rounding would cost a quarter of `clip_norm` or more.

    Attributes:
        clip_norm: C.
        deviation: Of the noise of a sum, C·σ2.
        batch: The expected batch size.
        examples: The most of a batch, padding included.
        slack: How far, in L2 and steps, rounding can move all rows of an example.
    """

    clip_norm: float
    deviation: float
    batch: float
    examples: int
    slack: float

    def __post_init__(self) -> None:
        if self.rounding_share >= 0.25:
            raise ValueError(
                f"Expected fewer lookups or smaller batches, got {self.examples} examples: "
                f"sums exact in float32 would cost {self.rounding_share:.0%} of clip_norm. Use "
                "keras.layers.Embedding, whose sums are float64."
            )

    @property
    def step(self) -> float:
        """A power of two, in units of a mean."""
        largest = (self.examples * self.clip_norm + _RANGE * self.deviation) / self.batch
        finest = self.deviation / self.batch * _FINEST
        return float(2.0 ** math.ceil(math.log2(max(largest / _EXACT, finest))))

    @property
    def rounding_share(self) -> float:
        """The part of C that is left to rounding."""
        return 1.01 * self.slack * self.step * self.batch / self.clip_norm

    @property
    def clip_norm_before_rounding(self) -> float:
        """To which examples are clipped, so that they are within C when rounded."""
        return self.clip_norm * (1 - self.rounding_share)

    def noise(self, normals: tf.Tensor) -> tf.Tensor:
        """Noise of a mean from standard normals, float64; float32 points."""
        scaled = normals * (self.deviation / self.batch / self.step)
        return tf.cast(tf.round(scaled) * self.step, tf.float32)

    def rounded(self, gradients: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Means' shares, float32, as points with these expectations; `seed` is int32 `[2]`."""
        steps = gradients / self.step
        below = tf.floor(steps)
        up = tf.random.stateless_uniform(tf.shape(gradients), seed) < steps - below
        return (below + tf.cast(up, tf.float32)) * self.step
