"""What a step releases of its clipped sums: noise, once, then division by the expected batch size.

Source: Ghazi et al., NeurIPS 2023, equation 1, where the realised batch size is printed.

`MovingClipNorm` follows a quantile of the gradients' norms.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.clipping import QuantileClipping


class NoisyMeans(NamedTuple):
    """All that a step releases of gradients; an update reads this and nothing else of the batch.

    Attributes:
        dense: Each dense variable with its noisy mean gradient.
        tables: Each table with the same on its chosen rows; of LazyDP the noisy sum, float64.
        unclipped: The noisy statistic of the clipping style over the expected batch size; None
            where the style has none.
    """

    dense: list[tuple[keras.Variable, tf.Tensor]]
    tables: list[tuple[keras.Variable, tf.IndexedSlices]]
    unclipped: tf.Tensor | None = None

    def tensors(self) -> list[tf.Tensor]:
        """All that they hold."""
        slices = [part for _, rows in self.tables for part in (rows.values, rows.indices)]
        rest = [] if self.unclipped is None else [self.unclipped]
        return [*(mean for _, mean in self.dense), *slices, *rest]

    def energies(self, deviation: noise.Number) -> tf.Tensor:
        """Σ (noisy mean / deviation)² of each dense variable, then of each table's chosen rows.

        Of noise alone it has a χ² distribution of as many degrees of freedom as there are entries.

        Args:
            deviation: Of the noise of each mean.

        Returns:
            Float64 `[dense + tables]`.
        """
        means = [*(mean for _, mean in self.dense), *(rows.values for _, rows in self.tables)]
        halves = tf.stack([tf.nn.l2_loss(mean) for mean in means] or [tf.zeros([])])[: len(means)]
        return 2 * tf.cast(halves, tf.float64) / tf.cast(deviation, tf.float64) ** 2


def noisy_dense(
    dense: Sequence[tuple[keras.Variable, tf.Tensor]],
    deviation: noise.Number,
    batch_size: float,
    draw: noise.Draw,
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Each variable with its noisy mean, float32."""
    totals = [total for _, total in dense]
    means = noise.noisy_means(totals, deviation, batch_size, draw, noise.Purpose.DENSE)
    return [(variable, mean) for (variable, _), mean in zip(dense, means, strict=True)]


def noisy_rows(
    slices: Sequence[tf.IndexedSlices],
    deviation: noise.Number,
    batch_size: float,
    draw: noise.Draw,
) -> list[tf.IndexedSlices]:
    """Each table's noisy mean on its chosen rows, float32, from one stream for all tables."""
    if not slices:
        return []
    flat = tf.concat([tf.reshape(rows.values, [-1]) for rows in slices], 0)
    noisy = noise.noisy_mean(flat, deviation, batch_size, draw, noise.Purpose.ROWS)
    parts = tf.split(noisy, tf.stack([tf.size(rows.values) for rows in slices]))
    return [
        tf.IndexedSlices(tf.reshape(part, tf.shape(rows.values)), rows.indices)
        for part, rows in zip(parts, slices, strict=True)
    ]


class MovingClipNorm:
    """C of `QuantileClipping`, as a variable of the optimizer.

    Args:
        style: How C moves.
        variable: Holds C, float64 scalar.
        noise_multiplier: Of the style's statistic.
        expected_batch_size: What the statistic is divided by.
    """

    def __init__(
        self,
        style: QuantileClipping,
        variable: keras.Variable,
        noise_multiplier: float,
        expected_batch_size: float,
    ) -> None:
        self._style = style
        self._variable = variable
        self._deviation = 0.5 * noise_multiplier  # the sensitivity of the statistic is ½
        self._expected_batch_size = expected_batch_size

    def value(self) -> tf.Tensor:
        """C of this step, float64 scalar."""
        return tf.convert_to_tensor(self._variable.value)

    def released(self, statistic: tf.Tensor, draw: noise.Draw) -> tf.Tensor:
        """The noisy statistic over the expected batch size, float32 scalar.

        Args:
            statistic: `QuantileClipping.statistic` of the batch, float64 scalar.
            draw: The step's streams.
        """
        return noise.noisy_mean(
            statistic, self._deviation, self._expected_batch_size, draw, noise.Purpose.UNCLIPPED
        )

    def move(self, released: tf.Tensor) -> None:
        """Sets the C of the next step by what `released` gave."""
        unclipped = 0.5 + tf.cast(released, tf.float64)
        self._variable.assign(self._style.following(self.value(), unclipped))
