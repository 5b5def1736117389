"""Keras' loss and metrics over the real examples of a private batch. They are not private.

Examples whose loss is not finite do not train, and do not count here either: one of them would turn
the loss of an epoch to nan (`NonFiniteWarning`). If no example of a batch is finite, the loss is
not either, which callbacks such as `TerminateOnNaN` look for.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import PrivacyError, replicas
from dp_sparse.sampling import Examples


def update(
    model: keras.Model,
    examples: Examples,
    outputs: Any,
    losses: tf.Tensor,
    output_losses: list[tf.Tensor],
    *,
    is_part: bool = False,
) -> dict[str, Any]:
    """Updates Keras' loss and metrics with the real ones of the examples.

    Of parts of a batch, `after_parts` says whether none of all of them was finite.

    Raises:
        PrivacyError: A metric writes anything but its own variables, or runs Python code.
    """
    with clipping.guarded(PrivacyError, lambda: _written(model), trains=False), _named(model):
        finite = tf.cast(tf.math.is_finite(losses), tf.float32)
        if not is_part:
            some = tf.reduce_any(finite * examples.present > 0)
            finite = tf.where(some, finite, tf.ones_like(finite))
        present = examples.present * finite
        losses, *output_losses = (
            tf.math.multiply_no_nan(each, finite) for each in (losses, *output_losses)
        )
        with tf.control_dependencies([losses]):  # its labels are checked; Keras' own are not
            y = tf.nest.map_structure(tf.identity, examples.y)
            count = tf.math.count_nonzero(present > 0)
        _track_losses(model, losses, output_losses, count)
        stock = getattr(model.compute_metrics, "__func__", None) is keras.Model.compute_metrics
        if stock and model._compile_metrics is None:  # so that Keras' own reads nothing of these
            return model.get_metrics_result()
        y, y_pred, sample_weight = _real((y, outputs, examples.sample_weight), present)
        x = examples.x if stock else _real(examples.x, present)  # Keras' own reads no x
        sample_weight = _by_output(sample_weight, y_pred)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def after_parts(model: keras.Model, counts: tf.Tensor) -> dict[str, Any]:
    """The logs of a batch in parts, with a loss of nan if no example of it was finite.

    Args:
        model: The model.
        counts: Of the batch, as in `Amounts`: examples, clipped, not finite.
    """
    none = tf.equal(counts[2], counts[0]) & (counts[0] > 0)
    loss = tf.where(none, float("nan"), 0.0)
    model._loss_tracker.update_state(loss, sample_weight=tf.cast(none, tf.float32))
    return model.get_metrics_result()


def _written(model: keras.Model) -> list[keras.Variable]:
    """The variables of the loss and the metrics, and the seeds of metrics.

    A metric may also hold variables of the model. It may not write those.
    """
    kept = {id(variable) for variable in (*model.variables, *model.optimizer.variables)}
    held = [value for metric in _metrics(model) for value in vars(metric).values()]
    seeds = [value.state for value in held if isinstance(value, keras.random.SeedGenerator)]
    found = [*clipping.metric_variables(model), *seeds]
    return [variable for variable in found if id(variable) not in kept]


def _metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """What `compile` got, and what the model owns."""
    compiled = model._compile_metrics
    own = [*model.metrics, *keras.Model.metrics.fget(model)]
    found = [*([] if compiled is None else compiled.metrics), *own]
    return list({id(metric): metric for metric in found}.values())


@contextlib.contextmanager
def _named(model: keras.Model) -> Iterator[None]:
    """Operations of a metric have its name, so that a refusal says which it is."""
    metrics = _metrics(model)
    for metric in metrics:
        metric.update_state = functools.partial(_in_scope, metric.name, metric.update_state)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.update_state


def _in_scope(name: str, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with tf.name_scope(re.sub(r"[^\w.]", "_", name)):
        return update(*args, **kwargs)


def _track_losses(
    model: keras.Model, losses: tf.Tensor, output_losses: list[tf.Tensor], count: tf.Tensor
) -> None:
    """Updates Keras' loss over `count` real examples, with regularisers, and each output's loss."""

    def mean(losses: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(count, losses.dtype))

    others = [  # Keras divides them by the number of replicas
        model._aggregate_additional_loss(loss) * replicas.count() for loss in model.losses
    ]
    model._loss_tracker.update_state(tf.add_n([mean(losses), *others]), sample_weight=count)
    trackers = model._compile_loss.metrics if output_losses else []
    for tracker, losses in zip(trackers, output_losses, strict=True):
        tracker.update_state(mean(losses), sample_weight=count)


def _real(values: Any, present: tf.Tensor) -> Any:
    """`values` without padding; not copied if there is no padding, since logits may be large."""

    def without_padding() -> Any:
        return tf.nest.map_structure(lambda value: tf.boolean_mask(value, present > 0), values)

    return tf.cond(
        tf.reduce_all(present > 0),
        lambda: tf.nest.map_structure(tf.identity, values),
        without_padding,
    )


def _by_output(sample_weight: Any, y_pred: Any) -> Any:
    """Weights `[batch]` with the axes of each output's losses.

    Keras' own reduction does not add them.
    """
    if tf.nest.is_nested(sample_weight) or sample_weight.shape.rank != 1:
        return sample_weight
    return tf.nest.map_structure(
        lambda output: tf.reshape(sample_weight, [-1] + [1] * (output.shape.rank - 2)), y_pred
    )
