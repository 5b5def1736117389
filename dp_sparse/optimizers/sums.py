"""What the private step hands to an optimizer: the rows of its choice, and clipped sums."""

import dataclasses

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class PrivateSums:
    """Clipped sums of one batch, made by the private step and by nothing else.

    Attributes:
        dense: Each dense variable with its sum.
        tables: Each table with its sum on the rows of the step's choice.
    """

    dense: list[tuple[keras.Variable, tf.Tensor]]
    tables: list[tuple[keras.Variable, tf.IndexedSlices]]

    def tensors(self) -> list[tf.Tensor]:
        """All that they hold."""
        rows = [each for _, slices in self.tables for each in tf.nest.flatten(slices, True)]
        return [*(total for _, total in self.dense), *rows]
