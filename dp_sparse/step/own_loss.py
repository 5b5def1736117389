"""A loss that a model computes by itself: a `compute_loss` in place of `compile(loss=...)`.

It gives one loss for each example, `[batch]`, or one number for the batch: the sum or the mean of
its examples' losses, or their sum ÷ the sum of all sample weights. Which of these is measured
before the first step, from batches of one example many times, and of two with other weights. That
no example's loss knows another one is for the preflight to see.

### Formal Guarantees
The gradient of the number, times the divisor that was measured, is recorded for each example apart,
as with a compiled loss; a constant, the number of an example's weights, replaces the sum of all
weights. If the number is something else, what is recorded of an example depends on its batch or on
the batch's size, which the preflight compares.
"""

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError
from dp_sparse.sampling import Examples

EACH, SUM, MEAN, WEIGHTED = "each", "sum", "mean", "weighted mean"
_COPIES = (2, 5)
_TRIED = 8  # examples, of which one has a loss that is not 0
_TOLERANCE = 2.0**-10  # relative: float32 sums of few terms, and half precision
_KINDS: weakref.WeakKeyDictionary[keras.Model, str] = weakref.WeakKeyDictionary()

_SHAPE = (
    "Expected {name}.compute_loss to return one number or losses [batch], got {found}.\n"
    "Return the mean over the batch, or reduce each example's values over its own axes."
)
_NEITHER = (
    "Expected {name}.compute_loss to return the sum or the mean of its examples' losses, got "
    "{one:.6g} for one example and {many:.6g} for {copies} copies of it.\n"
    "Reduce all of its parts alike, or return one loss for each example, [batch]."
)
_NO_LOSS = (
    "Expected {name}.compute_loss to give one example alone a finite loss other than 0, got none "
    "among {count}.\nAgainst the other examples of a batch, as with in-batch negatives, no loss is "
    "private. Any other one: return losses [batch]."
)
_UNKNOWN = (
    "The loss of {name} was not seen before its step was traced.\n"
    "Train with fit or train_on_batch; in a tf.function of your own, call "
    "dp_sparse.preflight(model, batch) first."
)


def has_own_loss(model: keras.Model) -> bool:
    """Whether the model computes its loss by itself."""
    own = inspect.unwrap(getattr(model.compute_loss, "__func__", model.compute_loss))
    return not str(getattr(own, "__module__", "")).startswith("keras.")


class OwnLoss:
    """The loss of one model over one batch.

    Args:
        model: With a `compute_loss` of its own.
        examples: The batch.
    """

    def __init__(self, model: keras.Model, examples: Examples) -> None:
        self._model, self._examples = model, examples

    def __call__(self, outputs: Any) -> tf.Tensor:
        """What the model gives for these outputs: a scalar or `[batch]`, float32.

        Raises:
            ValueError: It has another shape.
        """
        return _loss(self._model, self._examples, outputs, training=True)

    def of_examples(self, given: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """What follows from the loss: losses for clipping, those for logs, and their sum.

        The gradient of the sum is that of each example's loss in its own records. A scalar does not
        say which example's loss is not finite: its norm does.
        """
        present = self._examples.present
        if given.shape.rank == 1:
            losses = tf.where(present > 0, given, 0.0)
            return losses, losses, tf.reduce_sum(losses)
        size = tf.cast(tf.shape(present)[0], tf.float32)
        kind = _KINDS.get(self._model)
        if kind is None:
            raise PrivacyError(_UNKNOWN.format(name=self._model.name))
        nothing, mean = tf.zeros_like(present), given / size if kind == SUM else given
        return nothing, present * tf.stop_gradient(mean), self._total(given, kind, size)

    def _total(self, given: tf.Tensor, kind: str, size: tf.Tensor) -> tf.Tensor:
        """The sum of what each example has by itself."""
        if kind == SUM:
            return given
        if kind == MEAN:
            return given * size
        (weights,) = tf.nest.flatten(_weights(self._examples))
        return given * size * tf.reduce_mean(weights)


def own_loss_of(model: keras.Model, examples: Examples) -> OwnLoss | None:
    """The model's own loss over a batch; None if it has none."""
    return OwnLoss(model, examples) if has_own_loss(model) else None


def measure(model: keras.Model, examples: Examples) -> None:
    """Finds out what the model's own loss is, from a batch with an example; it runs eagerly.

    Nothing is kept of the batch.

    Raises:
        PrivacyError: It is neither a sum nor a mean, or no example tells.
        ValueError: It is neither a number nor `[batch]`.
    """
    if not has_own_loss(model) or model in _KINDS:
        return
    places = np.flatnonzero(np.asarray(examples.present) > 0)[:_TRIED]
    for place in places:
        one = _of_copies(model, examples, place, 1)
        if one.shape.rank == 1:
            _KINDS[model] = EACH
            return
        if np.isfinite(one.numpy()) and one.numpy() != 0:
            kind = _sum_or_mean(model, examples, place, float(one.numpy()))
            _KINDS[model] = kind if kind == SUM else _mean(model, examples, places)
            return
    raise PrivacyError(_NO_LOSS.format(name=type(model).__name__, count=len(places)))


def build_layers(model: keras.Model, examples: Examples) -> None:
    """Creates the variables of layers that the loss alone calls."""
    given = {"training": True} if model._call_has_training_arg else {}

    def called(examples: Examples) -> tf.Tensor:
        return _loss(model, examples, model(examples.x, **given), training=True)

    tf.function(called, autograph=False).get_concrete_function(examples)


def forget(model: keras.Model) -> None:
    """Of a model that is compiled anew."""
    _KINDS.pop(model, None)


def _sum_or_mean(model: keras.Model, examples: Examples, place: int, one: float) -> str:
    fits = {MEAN, SUM}
    for copies in _COPIES:
        many = float(_of_copies(model, examples, place, copies).numpy())
        wanted = {MEAN: one, SUM: one * copies}
        fits = {kind for kind in fits if _near(many, wanted[kind], abs(wanted[kind]))}
        if not fits:
            name = type(model).__name__
            raise PrivacyError(_NEITHER.format(name=name, one=one, many=many, copies=copies))
    (kind,) = fits  # copies of something that is not 0 have one of the two
    return kind


def _mean(model: keras.Model, examples: Examples, places: np.ndarray) -> str:
    """Whether a mean is over examples, or by the weights of two of which the second has more."""
    if len(tf.nest.flatten(examples.sample_weight)) != 1:
        return MEAN
    first, second = examples.sample_weight, 3.0 * tf.convert_to_tensor(examples.sample_weight)
    for one, other in itertools.pairwise(places):
        chosen = _chosen(examples, [one, other])
        heavier = chosen._replace(sample_weight=tf.stack([first[one], second[other]]))
        apart = [_chosen(heavier, [place]) for place in (0, 1)]
        losses = [float(_without_chance(model, each).numpy()) for each in apart]
        weights = [float(tf.reduce_sum(each.sample_weight)) for each in apart]
        both = float(_without_chance(model, heavier).numpy())
        size = max(map(abs, losses))
        if sum(weights) <= 0 or _near(losses[0], losses[1], size):
            continue  # nothing to tell a mean by
        if not _near(both, sum(losses) / 2, size) and _near(
            both, float(np.average(losses, weights=weights)), size
        ):
            return WEIGHTED
        return MEAN  # or something else, of which the preflight says where it mixes
    return MEAN


def _near(found: float, wanted: float, size: float) -> bool:
    return abs(found - wanted) <= _TOLERANCE * size


def _of_copies(model: keras.Model, examples: Examples, place: int, copies: int) -> tf.Tensor:
    """The loss of a batch that is one example so many times."""
    return _without_chance(model, _chosen(examples, [place] * copies))


def _chosen(examples: Examples, places: list[int]) -> Examples:
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, places), examples)


def _without_chance(model: keras.Model, examples: Examples) -> tf.Tensor:
    """The loss of a batch, without random layers."""
    given = {"training": False} if model._call_has_training_arg else {}
    return _loss(model, examples, model(examples.x, **given), training=False)


def _loss(model: keras.Model, examples: Examples, outputs: Any, training: bool) -> tf.Tensor:
    """As the model computes it, in float32."""
    y = examples.y if tf.nest.flatten(examples.y) else None
    with _without_trackers(model):
        loss = model._compute_loss(
            x=examples.x, y=y, y_pred=outputs, sample_weight=_weights(examples), training=training
        )
    try:
        loss = tf.cast(tf.convert_to_tensor(loss), tf.float32)
    except (TypeError, ValueError):
        found = type(loss).__name__
        raise ValueError(_SHAPE.format(name=type(model).__name__, found=found)) from None
    if loss.shape.rank not in (0, 1):
        found = f"shape {tuple(loss.shape)}"
        raise ValueError(_SHAPE.format(name=type(model).__name__, found=found))
    return loss


def _weights(examples: Examples) -> Any:
    """The sample weights; padding has that of any other example, 1, and so has what is none."""
    present = examples.present > 0

    def own(weights: tf.Tensor) -> tf.Tensor:
        there = tf.reshape(present, [-1] + [1] * (weights.shape.rank - 1))
        return tf.where(there & tf.math.is_finite(weights) & (weights >= 0), weights, 1.0)

    return tf.nest.map_structure(own, examples.sample_weight)


@contextlib.contextmanager
def _without_trackers(model: keras.Model) -> Iterator[None]:
    """A compiled loss that the model's own calls keeps nothing of each output's loss."""
    compiled = model._compile_loss
    if compiled is None:
        yield
        return
    metrics = compiled._metrics
    compiled._metrics = [_Nothing() for _ in metrics]
    try:
        yield
    finally:
        compiled._metrics = metrics


class _Nothing:
    def update_state(self, values: tf.Tensor, sample_weight: Any = None) -> None:
        """Leaves everything as it is."""
