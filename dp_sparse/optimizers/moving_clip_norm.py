"""A clip norm that follows a quantile of the gradients' norms."""

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.clipping import QuantileClipping


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
