"""Models whose losses are each example's own and whose gradients are not."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.attacks.entries import MEASURED, MIXES, Entry
from tests.attacks.measuring import Problem
from tests.attacks.towers import WIDTH, numbers, problem, scattered, tower
from tests.attacks.ways import BATCHES_OF_ONE, measured

ALL = ("graph", "eager", "xla", "microbatches", "mirrored")


def with_gradient(change: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[[Any], Any]:
    """The identity, with `change(values, dy)` for its gradient."""

    def identity(values: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def forward(x: tf.Tensor) -> Any:
            return tf.identity(x), lambda dy: change(x, dy)

        return forward(values)

    return identity


def straight_through(values: tf.Tensor) -> tf.Tensor:
    """Its value is that of each example; its derivative that of a mean over the batch."""
    mixed = values - tf.reduce_mean(values, axis=0)
    return mixed + tf.stop_gradient(values - mixed)


def gated(values: tf.Tensor) -> tf.Tensor:
    """A product with a batch mean whose other factor is 0, also where the mean is NaN."""
    mean = tf.zeros_like(values) + tf.reduce_mean(values, axis=0)
    return values + tf.math.multiply_no_nan(mean, tf.zeros_like(values))


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "clipped by the norm over the batch": lambda x, dy: tf.clip_by_norm(dy, 1.0),
    "divided by the largest of the batch": lambda x, dy: dy / (1e-3 + tf.reduce_max(tf.abs(dy))),
    "rows swapped": lambda x, dy: tf.reverse(dy, [0]),
    "the mean added": lambda x, dy: dy + 5 * tf.reduce_mean(dy, axis=0),
    "the mean of features instead": lambda x, dy: tf.zeros_like(dy) + tf.reduce_mean(x, axis=0),
    "scaled by the batch's size": lambda x, dy: dy * tf.cast(tf.shape(dy)[0], dy.dtype) / 8,
    "scaled by the batch's sign": lambda x, dy: dy * tf.sign(tf.reduce_sum(x)),
    "cumulative": lambda x, dy: tf.cumsum(dy, axis=0),
    "scaled by the place": lambda x, dy: (
        dy * (1 + tf.cast(tf.range(tf.shape(dy)[0]), dy.dtype))[:, None]
    ),
    "zero unless the batch is large": lambda x, dy: (
        dy * tf.cast(tf.reduce_max(tf.abs(x)) > 0.9, dy.dtype)
    ),
}


def rows_swapped_in_a_table() -> keras.Model:
    """The cotangents of looked-up rows are those of other examples."""
    ids = keras.Input((1,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(16, WIDTH)(ids))
    swap = keras.layers.Lambda(with_gradient(CHANGES["rows swapped"]), output_shape=(WIDTH,))
    return keras.Model(ids, keras.layers.Dense(1)(swap(rows)))


class Clips(keras.layers.Layer):
    """Inside a layer of the fallback."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, values: Any) -> Any:
        return with_gradient(CHANGES["clipped by the norm over the batch"])(self.scale * values)


def clipped_inside() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(1)(Clips()(keras.layers.Dense(3)(inputs))))


def activation_with_gradient() -> keras.Model:
    """The activation of a dense layer, which its rule records."""
    inputs = keras.Input((WIDTH,))
    activation = with_gradient(CHANGES["the mean added"])
    hidden = keras.layers.Dense(4, activation=activation)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def texts() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(8, dtype=np.int32)[:, None], np.arange(8, dtype=np.float32)[:, None]


def by_gradient_of_the_loss(y: Any, prediction: Any) -> tf.Tensor:
    """A loss with a gradient of the batch."""
    own = tf.reduce_sum(tf.square(prediction - y), axis=-1)
    return with_gradient(lambda x, dy: dy * tf.reduce_mean(x))(own)


_SHRINK = (
    "clipped by the norm over the batch",
    "divided by the largest of the batch",
    "zero unless the batch is large",
)


def of_change(name: str, change: Callable[[Any, Any], Any]) -> Problem:
    """On examples of which one makes the gradients of all others smaller, or turns them."""
    shrinks = name in _SHRINK
    data, clip_norm = (numbers(), 0.03) if shrinks else (scattered, 1.0)
    return problem(after=with_gradient(change), data=data, fields={"clip_norm": clip_norm})


ENTRIES = [
    Entry(
        f"gradient: {name}",
        measured(of_change(name, change)),
        MIXES,
        ALL if name == "clipped by the norm over the batch" else ("graph",),
        apart=BATCHES_OF_ONE,
    )
    for name, change in CHANGES.items()
] + [
    Entry(name, measured(of), expected)
    for name, of, expected in [
        (
            "gradient: clipped by the norm over 256 examples",
            problem(
                after=with_gradient(CHANGES["clipped by the norm over the batch"]),
                data=numbers(256),
                fields={"clip_norm": 0.03},
            ),
            MIXES,
        ),
        ("gradient: straight through a batch mean", problem(between=straight_through), MIXES),
        ("gradient: swapped in a table", Problem(rows_swapped_in_a_table, texts), MIXES),
        (
            "gradient: clipped inside a layer without a rule",
            Problem(clipped_inside, numbers()),
            MIXES,
        ),
        ("gradient: of an activation", Problem(activation_with_gradient, numbers()), MIXES),
        (
            "gradient: of the loss",
            Problem(tower(), numbers(), by_gradient_of_the_loss, removed=(1,), clip_norm=1e4),
            MIXES,
        ),
        ("honest: a product with a batch mean of weight 0", problem(between=gated), MEASURED),
        (
            "honest: each example's gradient clipped",
            problem(between=with_gradient(lambda x, dy: tf.clip_by_norm(dy, 1.0, axes=[1]))),
            MEASURED,
        ),
    ]
]
