"""Small models with one place where an attack goes in, and examples of which one stands out."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.attacks.measuring import Problem

WIDTH = 3
Part = Callable[[Any], Any]  # of values `[batch, width]`, as they are between two layers


def numbers(size: int = 8, outlier: float = 30.0) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Features near 1 and labels near 2, so that gradients add up; the second example stands out.

    Its features are `outlier` times larger, and its label `outlier` squared.
    """

    def data() -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        x = 1 + 0.3 * rng.normal(size=(size, WIDTH)).astype(np.float32)
        y = 2 + 0.3 * rng.normal(size=(size, 1)).astype(np.float32)
        x[1 % size] *= outlier
        y[1 % size] *= outlier**2
        return x, y

    return data


def scattered() -> tuple[np.ndarray, np.ndarray]:
    """Normal features and labels, so that gradients point everywhere; the second stands out."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, WIDTH)).astype(np.float32)
    x[1] *= 30
    return x, rng.normal(size=(8, 1)).astype(np.float32)


def opposed(size: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """As `numbers`, with one example whose gradient is against all others'."""

    def data() -> tuple[np.ndarray, np.ndarray]:
        x, y = numbers(size, outlier=1.0)()
        y[1] *= -1
        return x, y

    return data


def layer(part: Part) -> keras.layers.Layer:
    """A function as a layer that keeps shapes."""
    return keras.layers.Lambda(part, output_shape=lambda shape: shape)


def tower(
    before: Any = None, between: Any = None, after: Any = None, head: str = "glorot_uniform"
) -> Callable[[], keras.Model]:
    """Two dense layers with attacks around them; each is a function, or makes a layer."""

    def model() -> keras.Model:
        inputs = keras.Input((WIDTH,))
        values = _through(before, inputs)
        values = _through(between, keras.layers.Dense(4, activation="tanh")(values))
        values = keras.layers.Dense(1, kernel_initializer=head)(values)
        return keras.Model(inputs, _through(after, values))

    return model


def _through(part: Any, values: Any) -> Any:
    if part is None:
        return values
    made = part() if isinstance(part, Made) else layer(part)
    return made(values)


class Made:
    """Makes a layer anew for each model."""

    def __init__(self, make: Callable[[], keras.layers.Layer]) -> None:
        self._make = make

    def __call__(self) -> keras.layers.Layer:
        return self._make()


def problem(
    *, data: Any = None, loss: Any = "mse", fields: dict[str, Any] | None = None, **parts: Any
) -> Problem:
    """A tower on numbers, each of whose first examples is removed in turn."""
    given = {"removed": (0, 1, -1), **(fields or {})}
    return Problem(tower(**parts), data or numbers(), loss, **given)


def batch_size(values: Any) -> tf.Tensor:
    return tf.cast(tf.shape(values)[0], tf.float32)
