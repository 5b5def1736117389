"""Per-example gradients by brute force: a loop of tapes over single examples, stock Keras alone."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

LossOf = Callable[
    [Any, Any, Any], tf.Tensor
]  # (labels, predictions, weight) of a batch of one → scalar


def example_gradients(
    model: keras.Model, loss_of: LossOf, x: Any, y: Any, weights: Any = None
) -> list[list[np.ndarray]]:
    """For each example, its gradient of each trainable variable (float64); zeros if unused."""
    size = len(tf.nest.flatten(x)[0])
    gradients = []
    for i in range(size):
        one_x, one_y, one_weight = (_one(values, i) for values in (x, y, weights))
        with tf.GradientTape() as tape:
            loss = loss_of(one_y, model(one_x, training=True), one_weight)
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        gradients.append(
            [_dense(g, v) for g, v in zip(found, model.trainable_variables, strict=True)]
        )
    return gradients


def keras_loss(loss: keras.losses.Loss) -> LossOf:
    """A stock Keras loss on a batch of one."""
    return lambda y, prediction, weight: loss(y, prediction, sample_weight=weight)


def norms(gradients: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """‖g_i‖ over all variables together, `[batch]`."""
    return np.sqrt([sum(float(np.sum(part**2)) for part in example) for example in gradients])


def clipped_sum(
    gradients: Sequence[Sequence[np.ndarray]], clip_norm: float, present: Sequence[float]
) -> list[np.ndarray]:
    """Σ_i min(1, C/‖g_i‖)·g_i over the real examples, one array for each variable."""
    total = [np.zeros_like(part) for part in gradients[0]]
    for example, norm, real in zip(gradients, norms(gradients), present, strict=True):
        factor = min(1.0, clip_norm / norm) if norm > 0 else 1.0
        for part, gradient in zip(total, example, strict=True):
            part += (real > 0) * factor * gradient
    return total


def _one(values: Any, i: int) -> Any:
    if values is None:
        return None
    return tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[i : i + 1]), values)


def _dense(gradient: Any, variable: keras.Variable) -> np.ndarray:
    if gradient is None:
        return np.zeros(variable.shape)
    return tf.convert_to_tensor(gradient).numpy().astype(np.float64)
