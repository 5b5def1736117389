"""Re-Attention: honest, and with errors that are computed from the whole batch."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import layers
from tests.attacks.entries import MEASURED, MIXES, Entry
from tests.attacks.measuring import Problem
from tests.attacks.mixing_batch import sequence_data
from tests.attacks.towers import WIDTH, layer
from tests.attacks.ways import measured


def attentive(variance_of: Callable[[Any], Any]) -> Callable[[], keras.Model]:
    def model() -> keras.Model:
        inputs = keras.Input((4, WIDTH))
        variance = layer(variance_of)(inputs)
        attention = layers.ReAttention(1, WIDTH, weight_variance=0.01)
        attended, variance = attention(inputs, inputs, variance=variance, return_variance=True)
        dense = layers.WithVariance(keras.layers.Dense(WIDTH, "relu"), 0.01)
        mean, variance = dense(attended, variance)
        again = layers.ReAttention(1, WIDTH, weight_variance=0.01)(mean, mean, variance=variance)
        return keras.Model(inputs, keras.layers.Dense(1)(again[:, 0]))

    return model


def of_the_batch(values: Any) -> Any:
    """What each position of the batch varies by, stopped: not of one example."""
    return tf.zeros_like(values) + tf.math.reduce_variance(tf.stop_gradient(values), axis=0)


ENTRIES = [
    Entry(
        "honest: Re-Attention",
        measured(Problem(attentive(tf.square), sequence_data, removed=(0, 1))),
        MEASURED,
        ("graph", "microbatches"),
    ),
    Entry(
        "errors of Re-Attention from the batch",
        measured(Problem(attentive(of_the_batch), sequence_data)),
        MIXES,
    ),
]
