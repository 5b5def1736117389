"""Per-example losses of a compiled model: one number an example, from Keras' own loss objects.

Keras reduces over the batch, and its masked reduction divides by a count over the batch, which
mixes the examples. Here an example's loss is the mean over its own (unmasked) positions, times its
sample weight. Labels outside the range of their loss are refused, with their value, before anything
is computed from them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping import guarded, metric_variables
from dp_sparse.core import BadExampleError, PrivacyError, replicas, require

_PROBABILITY_LOSSES = (keras.losses.BinaryCrossentropy, keras.losses.BinaryFocalCrossentropy)
_PROBABILITY_FUNCTIONS = ("binary_crossentropy", "binary_focal_crossentropy")
_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def per_example_losses(
    model: keras.Model, y: Any, y_pred: Any, sample_weight: Any
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Each example's weighted loss over all outputs, and for each output that Keras tracks.

    All are float32 `[batch]`. For a model with one output Keras tracks no output separately.

    Raises:
        ValueError: A loss does not give a value for each example, or is not a mean.
        PrivacyError: A loss reads a trainable weight or a metric, keeps or writes anything, or
            draws random numbers.
        BadExampleError: At run time, a label outside the range of its loss.
    """
    compiled = model._compile_loss
    if compiled is None:
        raise ValueError(
            "Expected a model compiled with a loss, got loss=None: pass loss= to compile."
        )
    _refuse_other_labels(y, y_pred)
    y, sample_weight = (_in_order(model, named, y_pred) for named in (y, sample_weight))
    y, sample_weight = with_nothing(compiled, y), _of_all_outputs(sample_weight, y_pred)
    if not compiled.built:
        compiled.build(y, y_pred)
    with (
        _per_example(compiled) as trackers,
        guarded(PrivacyError, recorded=lambda: model.trainable_variables),
        replicas.apart(),
        _LossGuard(model),
    ):
        total = compiled(y, y_pred, sample_weight)
    return total, [tracker.values for tracker in trackers]


def _in_order(model: keras.Model, named: Any, y_pred: Any) -> Any:
    """Values by the names of outputs as a list, if the model gives its outputs as one."""
    names = getattr(model, "output_names", None)
    if not isinstance(named, dict) or not isinstance(y_pred, list | tuple) or not names:
        return named
    return [named[name] for name in names] if set(named) == set(names) else named


def _refuse_other_labels(y: Any, y_pred: Any) -> None:
    """Raises ValueError for labels of what is no output."""
    if not isinstance(y, dict) or not isinstance(y_pred, dict) or set(y) <= set(y_pred):
        return
    other = sorted(set(y) - set(y_pred))
    raise ValueError(
        f"Expected labels y of the outputs {sorted(y_pred)}, got y[{other[0]!r}], which no loss "
        "takes.\nMove what a loss looks up from y to x, or write compute_loss, which gets both."
    )


def with_nothing(compiled: Any, y: Any) -> Any:
    """Labels by the names of outputs, None for those whose loss is None, as Keras has them."""
    losses = compiled._user_loss
    if not isinstance(losses, dict) or not isinstance(y, dict):
        return y
    return {**y, **{name: None for name, loss in losses.items() if loss is None}}


def _of_all_outputs(weights: Any, y_pred: Any) -> Any:
    """Weights of each output; those without labels, and so without a loss, get any."""
    if not isinstance(weights, dict) or not isinstance(y_pred, dict) or not weights:
        return weights
    default = next(iter(weights.values()))
    return {name: weights.get(name, default) for name in y_pred}


class _LossGuard(keras.StatelessScope):
    """Refuses what a loss does with variables, except reading those that training never changes."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        refused = [*model.trainable_variables, *metric_variables(model)]
        self._refused = {id(variable) for variable in refused}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """The value of a variable that Keras reads."""
        if id(variable) in self._refused:
            raise PrivacyError(
                f"The loss reads {variable.path}: its gradient would be left out, or it is a "
                "statistic without noise. Compute it in a layer, as one of the model's outputs."
            )
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Refuses an assignment, which Keras reports here, also that of a seed."""
        raise PrivacyError(
            f"The loss writes {update[0].path}: what it keeps from batch to batch has no noise, "
            "and its own random numbers can be predicted. Use a loss without state."
        )


@dataclasses.dataclass
class _Tracker:
    """Keeps the values that Keras gives to the tracker of one output's loss."""

    values: Any = None  # float32 [batch]

    def update_state(self, values: tf.Tensor, sample_weight: Any = None) -> None:
        self.values = values


@contextlib.contextmanager
def _per_example(compiled: Any) -> Iterator[list[_Tracker]]:
    """Makes the compiled loss sum over outputs, not over examples; its metrics do not change."""
    losses, metrics = compiled._flat_losses, compiled._metrics
    compiled._flat_losses = [entry._replace(loss=_PerExample(entry.loss)) for entry in losses]
    compiled._metrics = [_Tracker() for _ in metrics]
    try:
        yield compiled._metrics
    finally:
        compiled._flat_losses, compiled._metrics = losses, metrics


class _PerExample:
    """Calls a Keras loss without its reduction over the batch."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        if loss.reduction not in _REDUCTIONS:
            raise ValueError(
                f"Expected a loss with reduction='sum_over_batch_size', got "
                f"reduction={loss.reduction!r} in {loss.name}: the private step takes the mean "
                "over an example and divides by the expected batch size."
            )
        self._loss = loss

    def __call__(self, y_true: Any, y_pred: tf.Tensor, sample_weight: Any = None) -> tf.Tensor:
        y_true = tf.convert_to_tensor(y_true)
        _refuse_text(self._loss, y_true)
        _refuse_broadcasting(self._loss, y_true, y_pred)
        mask = getattr(y_pred, "_keras_mask", None)
        y_pred = tf.cast(y_pred, self._loss.dtype)
        y_true = _checked_labels(self._loss, tf.cast(y_true, self._loss.dtype), y_pred)
        values = self._loss.call(y_true, y_pred)
        if values.shape.rank == 0:
            raise ValueError(
                f"Expected loss {self._loss.name} to give one value for each example, got a "
                "scalar, which mixes the examples of a batch. Return the values without reducing "
                "over the batch, from outputs `[batch, ...]` of rank 2 or more."
            )
        if values.shape[0] not in (None, y_pred.shape[0]):
            raise ValueError(
                f"Expected loss {self._loss.name} to give one value for each example, got "
                f"{values.shape[0]} values whatever the batch. Reduce over an example's own axes "
                f"only, and keep the first axis."
            )
        own = getattr(values, "_keras_mask", None)  # of an ignored class
        mask = own if mask is None else mask if own is None else mask & own
        return _own_mean(tf.cast(values, tf.float32), mask, sample_weight)


def _refuse_text(loss: keras.losses.Loss, y_true: tf.Tensor) -> None:
    """Raises ValueError for labels that are text."""
    if y_true.dtype == tf.string:
        raise ValueError(
            f"Expected numbers as labels y for loss {loss.name}, got text (dtype string).\n"
            "Give each class a number before training, for example by "
            "keras.layers.StringLookup(vocabulary=classes, num_oov_indices=0)(y)."
        )


def _refuse_broadcasting(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> None:
    """Raises PrivacyError if `[batch]` against `[batch, 1]` becomes `[batch, batch]` in the loss.

    Keras gives both the same axes in its own losses, and in a function, but not in a `call`.
    """
    shapes = {1: "[batch]", 2: "[batch, 1]"}
    ranks = y_true.shape.rank, y_pred.shape.rank
    if hasattr(loss, "fn") or ranks not in ((1, 2), (2, 1)):
        return
    if (y_true if ranks == (2, 1) else y_pred).shape[-1] != 1:
        return
    size = 7919  # a prime that no other axis has
    specs = [tf.TensorSpec([size, 1][:rank], loss.dtype) for rank in ranks]
    try:
        graph = tf.function(loss.call, autograph=False).get_concrete_function(*specs).graph
    except Exception:
        return  # what is wrong with it is said when it is called
    made = [out.shape for op in graph.get_operations() for out in op.outputs]
    if any(shape.rank and shape.as_list().count(size) > 1 for shape in made):
        labels, outputs = map(shapes.get, ranks)
        raise PrivacyError(
            f"Expected labels in the shape of the outputs for loss {loss.name}, got labels "
            f"{labels} against outputs {outputs}: it compares each example with all of its batch.\n"
            "Give y and the outputs the same axes, for example y.reshape(-1, 1)."
        )


def _own_mean(values: tf.Tensor, mask: Any, sample_weight: Any) -> tf.Tensor:
    """Mean over an example's own positions, float32 `[batch]`, of `values` `[batch, ...]`."""
    if mask is None and values.shape.rank == 1:  # a mean of one
        return values if sample_weight is None else _weighted(values, _like(sample_weight, values))
    weights = tf.ones_like(values)
    if mask is not None:
        weights *= _like(mask, values)
    positions = list(range(1, values.shape.rank))
    count = tf.reduce_sum(weights, axis=positions)
    if sample_weight is not None:
        weights *= _like(sample_weight, values)
    total = tf.reduce_sum(_weighted(values, weights), axis=positions)
    return tf.math.divide_no_nan(total, count)


def _weighted(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.where(weights > 0, values, 0.0) * weights  # the loss of padding may be NaN


def _like(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """The weights, float32, of as many axes as the values."""
    weights = tf.cast(weights, tf.float32)
    if weights.shape.rank > values.shape.rank:
        return tf.reshape(weights, tf.shape(values))
    missing = values.shape.rank - weights.shape.rank
    if not missing:
        return weights
    return tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0))


def _checked_labels(loss: keras.losses.Loss, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    if isinstance(loss, _PROBABILITY_LOSSES) or _function_name(loss) in _PROBABILITY_FUNCTIONS:
        bad, accepted = (
            (y_true < 0) | (y_true > 1),
            "[0, 1]",
        )  # NaN gives a NaN loss, and is zeroed and counted
    elif _function_name(loss) == "sparse_categorical_crossentropy":
        classes = y_pred.shape[-1]
        bad, accepted = ~((y_true >= 0) & (y_true < classes)), f"[0, {classes})"
        ignored = getattr(loss, "ignore_class", None)
        bad = bad if ignored is None else bad & tf.not_equal(y_true, float(ignored))
    else:
        return y_true
    values = tf.concat([tf.reshape(y_true, [-1]), [0.0]], 0)
    first_bad = tf.argmax(tf.concat([tf.reshape(bad, [-1]), [True]], 0))
    worst = tf.gather(values, first_bad)  # a slice would be compiled by XLA for each index
    message = (
        f"Expected labels in {accepted} for loss {loss.name}, got {{}}. "
        "Clean the labels, or choose another loss."
    )
    with tf.control_dependencies([require(~tf.reduce_any(bad), BadExampleError, message, worst)]):
        return tf.identity(y_true)


def _function_name(loss: keras.losses.Loss) -> str:
    return getattr(getattr(loss, "fn", None), "__name__", "")
