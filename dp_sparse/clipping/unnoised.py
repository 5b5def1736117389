"""Variables of this process that hold statistics of training batches, without noise.

What trains, of whatever model, may not read them: metrics that Keras updates with each batch, and
the running totals that reports read.
"""

import weakref

import keras
import tensorflow as tf

_MODELS: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_TOTALS: weakref.WeakSet[object] = weakref.WeakSet()


def trains(model: keras.Model, totals: object) -> None:
    """From now on the metrics of `model` are such variables, and those of the object `totals`."""
    _MODELS.add(model)
    _TOTALS.add(totals)


def unnoised_variables() -> list[keras.Variable | tf.Variable]:
    """All of them, of models that live."""
    totals = [v for each in _TOTALS for v in each.unnoised_variables()]  # type: ignore[attr-defined]
    return [*(v for model in list(_MODELS) for v in metric_variables(model)), *totals]


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Those of all metrics of a model: statistics of past batches, without noise."""
    compiled = model._compile_metrics
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    metrics = [*model.metrics, *tf.nest.flatten(given)]  # some are built with their first batch
    return [v for m in metrics if isinstance(m, keras.metrics.Metric) for v in m.variables]
