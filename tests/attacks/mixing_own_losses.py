"""Losses that models compute by themselves, in which examples know each other or their number."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.attacks.entries import MEASURED, MIXES, REFUSED, Entry
from tests.attacks.measuring import Problem
from tests.attacks.mixing_losses import LOSSES, sample_weighted, squares
from tests.attacks.towers import batch_size, numbers, opposed, scattered, tower
from tests.attacks.ways import BATCHES_OF_ONE, measured

Own = Callable[[Any, Any, Any], tf.Tensor]  # of y, y_pred and sample_weight


def with_own(loss: Own) -> Callable[[], keras.Model]:
    """A tower whose `compute_loss` is this."""

    class Tower(keras.Model):
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> tf.Tensor:
            return loss(y, y_pred, sample_weight)

    def model() -> keras.Model:
        source = tower()()
        return Tower(source.inputs, source.outputs)

    return model


def own(loss: Own, data: Any = None, **fields: Any) -> Problem:
    given = {"removed": (0, 1, -1), **fields}
    return Problem(with_own(loss), data or numbers(), None, **given)


def mean_of(losses: Callable[[Any, Any], tf.Tensor]) -> Own:
    return lambda y, y_pred, weights: tf.reduce_mean(losses(y, y_pred))


def in_batch_negatives(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    """Each example's label against those of all: one example alone has no loss."""
    logits = y_pred @ tf.transpose(y)
    labels = tf.range(tf.shape(logits)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def by_weights(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    return tf.reduce_sum(weights * squares(y, y_pred)) / tf.reduce_sum(weights)


def by_squared_weights(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    return tf.reduce_sum(weights * squares(y, y_pred)) / tf.reduce_sum(weights**2)


def by_labels(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    return tf.reduce_sum(squares(y, y_pred)) / (1.0 + tf.reduce_sum(tf.abs(y)))


def root(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(squares(y, y_pred)))


def largest(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    return tf.reduce_max(squares(y, y_pred))


def sum_and_mean(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    losses = squares(y, y_pred)
    return tf.reduce_sum(losses) + tf.reduce_mean(losses)


def sum_of_few(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    """The sum of few examples, and the mean of many."""
    losses = squares(y, y_pred)
    size = batch_size(losses)
    return tf.reduce_sum(losses) / tf.where(size > 6.0, size, 1.0)


def squared_size(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    losses = squares(y, y_pred)
    return tf.reduce_mean(losses) / batch_size(losses)


def each_with_the_mean(y: Any, y_pred: Any, weights: Any) -> tf.Tensor:
    losses = squares(y, y_pred)
    return losses - tf.reduce_mean(losses)


_HARMLESS = ("masked by the batch", "one value for all")  # once a mean is taken
_TURNING = ("the harder half",)  # shows where gradients point everywhere

MIXING = {
    **{
        f"the mean of {name}": own(mean_of(loss), scattered if name in _TURNING else None)
        for name, loss in LOSSES.items()
        if name not in _HARMLESS
    },
    "by squares of the batch's weights": own(by_squared_weights, sample_weighted),
    "by the batch's labels": own(by_labels),
    "the root of the mean": own(root),
    "the largest": own(largest),
    "a sum of few and a mean of many": own(sum_of_few, opposed(8), clip_norm=1.2),
    "one for each, less the mean": own(each_with_the_mean),
}

ENTRIES = (
    [
        Entry(f"own loss: {name}", measured(problem), MIXES, apart=BATCHES_OF_ONE)
        for name, problem in MIXING.items()
    ]
    + [
        Entry(f"own loss: {name}", measured(own(loss)), REFUSED.matching(words))
        for name, loss, words in [
            ("in-batch negatives", in_batch_negatives, "in-batch negatives"),
            ("a sum and a mean", sum_and_mean, "the sum or the mean"),
            ("by the square of the size", squared_size, "the batch's size"),
        ]
    ]
    + [
        Entry(f"honest: an own loss, {name}", measured(own(loss, sample_weighted)), MEASURED)
        for name, loss in [
            ("the mean", lambda y, y_pred, w: tf.reduce_mean(w * squares(y, y_pred))),
            ("the sum", lambda y, y_pred, w: tf.reduce_sum(w * squares(y, y_pred))),
            ("by the batch's weights", by_weights),
            ("one for each", lambda y, y_pred, w: w * squares(y, y_pred)),
        ]
    ]
)
