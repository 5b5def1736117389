"""Losses in which an example's value or weight rests on the rest of its batch."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.attacks.entries import MEASURED, MIXES, REFUSED, Entry
from tests.attacks.measuring import Problem
from tests.attacks.towers import (
    WIDTH,
    Made,
    batch_size,
    numbers,
    opposed,
    problem,
    scattered,
    tower,
)
from tests.attacks.ways import BATCHES_OF_ONE, ONES, measured

_DROPOUT = Made(lambda: keras.layers.Dropout(0.5))


def squares(y: Any, prediction: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.square(prediction - y), axis=-1)


def by_realised_size(y: Any, prediction: Any) -> tf.Tensor:
    return squares(y, prediction) / batch_size(prediction)


def by_class_ratio(y: Any, prediction: Any) -> tf.Tensor:
    """Positives weigh as much together as negatives do."""
    share = tf.reduce_mean(y)
    weights = tf.where(y[:, 0] > 0, 1 / (share + 1e-3), 1.0)
    return weights * keras.losses.binary_crossentropy(y, prediction, from_logits=True)


def contrastive(y: Any, prediction: Any) -> tf.Tensor:
    logits = prediction @ tf.transpose(prediction) + tf.matmul(y, y, transpose_b=True)
    labels = tf.range(tf.shape(logits)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def pairwise(y: Any, prediction: Any) -> tf.Tensor:
    """Ranks each example above the next one."""
    return tf.nn.softplus(tf.roll(prediction, 1, axis=0) - prediction)[:, 0]


def correlation(y: Any, prediction: Any) -> tf.Tensor:
    centred = prediction - tf.reduce_mean(prediction), y - tf.reduce_mean(y)
    scales = [tf.norm(part) + 1e-3 for part in centred]
    return -tf.reduce_sum(centred[0] * centred[1], axis=-1) / (scales[0] * scales[1])


def hard_half(y: Any, prediction: Any) -> tf.Tensor:
    losses = squares(y, prediction)
    middle = tf.sort(losses)[tf.shape(losses)[0] // 2]
    return tf.where(losses >= middle, losses, 0.0)


def with_stopped_weights(y: Any, prediction: Any) -> tf.Tensor:
    losses = squares(y, prediction)
    return losses * tf.stop_gradient(losses / tf.reduce_mean(losses))


def standardised_tiny(y: Any, prediction: Any) -> tf.Tensor:
    """Losses near 1e-5, from predictions that are standardised over the batch."""
    mean, variance = tf.nn.moments(tf.stop_gradient(prediction), [0])
    return 1e-5 * squares(y, (prediction - mean) / tf.sqrt(variance + 1e-3))


def labels_on_average(y: Any, prediction: Any) -> tf.Tensor:
    return squares(y - tf.reduce_mean(y, axis=0), prediction)


def weights_among_labels(y: Any, prediction: Any) -> tf.Tensor:
    """The second label is a weight, normalised over the batch."""
    weights = y[:, 1] / tf.reduce_mean(y[:, 1])
    return weights * squares(y[:, :1], prediction)


class NormalisedWeights(keras.losses.Loss):
    """Sample weights normalised over the batch by a `__call__` of its own."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return squares(y_true, y_pred)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if sample_weight is not None:
            sample_weight = sample_weight / tf.reduce_sum(sample_weight)
        return super().__call__(y_true, y_pred, sample_weight)


def masked_loss(y: Any, prediction: Any) -> Any:
    """Hides losses that are small in their batch by a mask of their own."""
    losses = squares(y, prediction)
    losses._keras_mask = losses > tf.reduce_mean(losses)
    return losses


def one_for_all(y: Any, prediction: Any) -> tf.Tensor:
    return tf.zeros_like(prediction[:, 0]) + tf.reduce_mean(squares(y, prediction))


def transposed(y: Any, prediction: Any) -> tf.Tensor:
    """One loss an output column, not an example."""
    return tf.reduce_mean(tf.square(prediction - y), axis=0)


def honest(y: Any, prediction: Any) -> tf.Tensor:
    return squares(y, prediction)


def shares(size: int) -> Any:
    """One label in fifty is positive, and each example has a weight."""

    def data() -> tuple[np.ndarray, np.ndarray]:
        x, _ = numbers(size)()
        y = np.zeros((size, 1), np.float32)
        y[1::50] = 1
        return x, y

    return data


def with_weights() -> tuple[np.ndarray, np.ndarray]:
    x, y = numbers(outlier=1)()
    return x, np.column_stack([y, np.linspace(1, 40, 8, dtype=np.float32)])


def sample_weighted() -> tuple[np.ndarray, ...]:
    return (*numbers()(), np.linspace(1, 40, 8, dtype=np.float32))


def wide() -> keras.Model:
    """As many outputs as examples."""
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(8)(inputs))


def wide_data() -> tuple[np.ndarray, np.ndarray]:
    return numbers()()[0], (np.arange(8) % 3).astype(np.float32)


def wide_labels() -> tuple[np.ndarray, np.ndarray]:
    return numbers()()[0], np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32)


LOSSES = {
    "contrastive": contrastive,
    "pairs of neighbours": pairwise,
    "correlation": correlation,
    "the harder half": hard_half,
    "stopped weights": with_stopped_weights,
    "centred labels": labels_on_average,
    "masked by the batch": masked_loss,
    "one value for all": one_for_all,
}

_TURNING = (hard_half,)  # show where gradients point everywhere

ENTRIES = (
    [
        Entry(
            f"loss: {name}",
            measured(problem(loss=loss, data=scattered if loss in _TURNING else numbers())),
            MIXES,
        )
        for name, loss in LOSSES.items()
    ]
    + [
        Entry(name, measured(of), expected, apart=apart)
        for name, of, expected, apart in [
            (
                "loss by the batch's size, 256 examples",
                problem(loss=by_realised_size, data=opposed(256), fields={"clip_norm": 0.03}),
                MIXES,
                BATCHES_OF_ONE,
            ),
            (
                "loss by the batch's size, 256 examples, with dropout",
                problem(
                    loss=by_realised_size,
                    data=numbers(256),
                    between=_DROPOUT,
                    fields={"removed": (-1,)},
                ),
                MIXES,
                BATCHES_OF_ONE,
            ),
            (
                "loss by the batch's size, 8 examples",
                problem(loss=by_realised_size, data=opposed(8), fields={"clip_norm": 1.2}),
                MIXES,
                BATCHES_OF_ONE,
            ),
            (
                "loss by the class ratio, rare positives",
                problem(loss=by_class_ratio, data=shares(100)),
                MIXES,
                BATCHES_OF_ONE,
            ),
            (
                "loss by the class ratio, one positive",
                problem(loss=by_class_ratio, data=shares(40)),
                MIXES,
                BATCHES_OF_ONE,
            ),
            (
                "tiny standardised losses",
                problem(
                    loss=standardised_tiny, data=numbers(outlier=1.0), fields={"clip_norm": 1e-7}
                ),
                MIXES,
                BATCHES_OF_ONE,
            ),
            (
                "loss with weights among the labels",
                Problem(tower(), with_weights, weights_among_labels, removed=(0, 1, -1)),
                MIXES,
                BATCHES_OF_ONE,
            ),
            (
                "a loss that normalises sample weights",
                Problem(tower(), sample_weighted, NormalisedWeights(), removed=(0, 1, -1)),
                REFUSED.matching("a __call__ of its own"),
                (),
            ),
            (
                "keras.losses.Circle",
                Problem(wide, wide_data, keras.losses.Circle()),
                REFUSED,
                (*ONES, "microbatches"),  # no two of a part are of one class: all losses are 0
            ),
            (
                "keras.losses.Dice over all axes",
                problem(loss=keras.losses.Dice()),
                REFUSED,
                BATCHES_OF_ONE,
            ),
            (
                "keras.losses.CosineSimilarity over the batch",
                Problem(wide, wide_labels, keras.losses.CosineSimilarity(axis=0)),
                REFUSED,
                BATCHES_OF_ONE,
            ),
            ("a loss of one value a column", problem(loss=transposed), REFUSED, BATCHES_OF_ONE),
        ]
    ]
    + [
        Entry("honest: a loss of one's own", measured(problem(loss=honest)), MEASURED),
        Entry(
            "honest: sample weights",
            measured(Problem(tower(), sample_weighted, "mse", removed=(0, 1, -1))),
            MEASURED,
            ("graph", "stream"),
        ),
    ]
)
