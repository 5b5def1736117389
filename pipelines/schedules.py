"""The learning rate of Ding et al. (ICML 2024), D.6: linear warm-up, then linear decay to 0."""

import math
from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="pipelines")
class WarmUpAndDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises to `peak` over the first part of the steps, and falls to 0 at their end.

    Args:
        peak: The highest rate.
        steps: All steps of the run.
        warm_up: The part of them in which it rises, in (0, 1).
    """

    def __init__(self, peak: float, steps: int, warm_up: float = 0.2) -> None:
        if not 0 < warm_up < 1:
            raise ValueError(f"Expected 0 < warm_up < 1, got warm_up={warm_up!r}.")
        if not 0 < peak < math.inf:
            raise ValueError(f"Expected a finite learning_rate > 0, got learning_rate={peak!r}.")
        self.peak, self.steps, self.warm_up = peak, steps, warm_up

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """The rate of a step, from 0 on."""
        done = (tf.cast(step, tf.float32) + 1.0) / (self.steps + 1.0)
        return self.peak * tf.minimum(done / self.warm_up, (1.0 - done) / (1.0 - self.warm_up))

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"peak": self.peak, "steps": self.steps, "warm_up": self.warm_up}
