"""A loss that a model computes by itself: a `compute_loss` in place of `compile(loss=...)`.

It gives one loss for each example, `[batch]`, or one number for the batch: the sum or the mean of
its examples' losses, or their sum ÷ the sum of all sample weights. `loss_kind` measures which.

### Formal Guarantees
It runs inside the recorded pass alone, under its guards. The gradient of the number, times the
divisor that was measured, is recorded for each example apart, as with a compiled loss; a constant,
the number of an example's weights, replaces the sum of all weights. If the number is something
else, what is recorded of an example depends on its batch or on the batch's size, which the
preflight compares.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf

from dp_sparse.core import PrivacyError, UnsupportedLayerError
from dp_sparse.sampling import Examples
from dp_sparse.step.unsupported import is_own

EACH, SUM, MEAN, WEIGHTED = "each", "sum", "mean", "weighted mean"
_KINDS: weakref.WeakKeyDictionary[keras.Model, str] = weakref.WeakKeyDictionary()

_SHAPE = (
    "Expected {name}.compute_loss to return one number or losses [batch], got {found}.\n"
    "Return the mean over the batch, or reduce each example's values over its own axes."
)
_UNKNOWN = (
    "The loss of {name} was not seen before its step was traced.\n"
    "Train with fit or train_on_batch; in a tf.function of your own, call "
    "dp_sparse.preflight(model, batch) first."
)


def has_own_loss(model: keras.Model) -> bool:
    """Whether the model computes its loss by itself."""
    return "compute_loss" in vars(model) or is_own(type(model), "compute_loss")


def kind_of(model: keras.Model) -> str | None:
    """What its loss was measured to be; None if it was not."""
    return _KINDS.get(model)


def set_kind(model: keras.Model, kind: str) -> None:
    """Keeps what was measured until the model is compiled anew."""
    _KINDS[model] = kind


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
        return _loss(self._model, self._examples, outputs)

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
        kind = kind_of(self._model)
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


def build_layers(model: keras.Model, examples: Examples) -> None:
    """Creates the variables of layers that the loss alone calls."""
    given = {"training": True} if model._call_has_training_arg else {}

    def called(examples: Examples) -> tf.Tensor:
        return _loss(model, examples, model(examples.x, **given))

    tf.function(called, autograph=False).get_concrete_function(examples)


def forget(model: keras.Model) -> None:
    """Drops what was measured of a model, which is compiled anew."""
    _KINDS.pop(model, None)


def _loss(model: keras.Model, examples: Examples, outputs: Any) -> tf.Tensor:
    """As the model computes it, in float32."""
    y = examples.y if tf.nest.flatten(examples.y) else None
    with _without_trackers(model), _without_regularisers(model), _without_tapes(model):
        loss = model._compute_loss(
            x=examples.x, y=y, y_pred=outputs, sample_weight=_weights(examples), training=True
        )
    try:
        loss = tf.cast(tf.convert_to_tensor(loss), tf.float32)
    except (TypeError, ValueError):
        found = type(loss).__name__
        raise ValueError(_SHAPE.format(name=type(model).__name__, found=found)) from None
    if loss.shape.rank not in (0, 1):
        found = "an unknown shape" if loss.shape.rank is None else f"shape {tuple(loss.shape)}"
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


@contextlib.contextmanager
def _without_regularisers(model: keras.Model) -> Iterator[None]:
    """The private step applies them to the update; here they would be read as data."""
    regularised = [(v, v.regularizer) for v in model.trainable_variables if v.regularizer]
    for variable, _ in regularised:
        variable.regularizer = None
    try:
        yield
    finally:
        for variable, own in regularised:
            variable.regularizer = own


@contextlib.contextmanager
def _without_tapes(model: keras.Model) -> Iterator[None]:
    """A gradient that a loss takes of itself uses weights where nothing records them."""

    def enter(tape: tf.GradientTape) -> NoReturn:
        raise UnsupportedLayerError(
            f"{type(model).__name__}.compute_loss records a gradient (tf.GradientTape), whose own "
            "gradient by the weights is not recorded for each example: leave it out."
        )

    own, tf.GradientTape.__enter__ = tf.GradientTape.__enter__, enter
    try:
        yield
    finally:
        tf.GradientTape.__enter__ = own


class _Nothing:
    def update_state(self, values: tf.Tensor, sample_weight: Any = None) -> None:
        """Leaves everything as it is."""
