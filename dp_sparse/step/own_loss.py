"""A loss that a model computes by itself: a `compute_loss` in place of `compile(loss=...)`.

It gives one loss for each example, `[batch]`, or one number for the batch, which must be the sum or
the mean of its examples' losses. Which of the two is measured before the first step: of a batch
that is one example many times, a mean is that example's loss, and a sum so many times as much. That
no example's loss knows another one is for the preflight to see.

### Formal Guarantees
The gradient of the number, times the size of the batch if it is a mean, is recorded for each
example apart, as with a compiled loss. If the number is neither sum nor mean, what is recorded of
an example depends on its batch or on the batch's size, which the preflight compares.
"""

import contextlib
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError
from dp_sparse.sampling import Examples

MEAN, SUM, EACH = "mean", "sum", "each"
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
        total = given * size if kind == MEAN else given
        return tf.zeros_like(present), present * tf.stop_gradient(total) / size, total


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
            _KINDS[model] = _kind(model, examples, place, float(one.numpy()))
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


def _kind(model: keras.Model, examples: Examples, place: int, one: float) -> str:
    fits = {MEAN, SUM}
    for copies in _COPIES:
        many = float(_of_copies(model, examples, place, copies).numpy())
        wanted = {MEAN: one, SUM: one * copies}
        fits = {kind for kind in fits if abs(many - wanted[kind]) <= _TOLERANCE * abs(wanted[kind])}
        if not fits:
            name = type(model).__name__
            raise PrivacyError(_NEITHER.format(name=name, one=one, many=many, copies=copies))
    (kind,) = fits  # copies of something that is not 0 have one of the two
    return kind


def _of_copies(model: keras.Model, examples: Examples, place: int, copies: int) -> tf.Tensor:
    """The loss of a batch that is one example so many times, without random layers."""
    several = tf.nest.map_structure(
        lambda leaf: tf.repeat(tf.convert_to_tensor(leaf)[place : place + 1], copies, axis=0),
        examples,
    )
    given = {"training": False} if model._call_has_training_arg else {}
    return _loss(model, several, model(several.x, **given), training=False)


def _loss(model: keras.Model, examples: Examples, outputs: Any, training: bool) -> tf.Tensor:
    """As the model computes it, in float32."""
    present = examples.present > 0
    weights = tf.nest.map_structure(  # padding has the weight of any other example
        lambda w: tf.where(tf.reshape(present, [-1] + [1] * (w.shape.rank - 1)), w, 1.0),
        examples.sample_weight,
    )
    y = examples.y if tf.nest.flatten(examples.y) else None
    with _without_trackers(model):
        loss = model._compute_loss(
            x=examples.x, y=y, y_pred=outputs, sample_weight=weights, training=training
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
