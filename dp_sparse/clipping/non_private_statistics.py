"""Variables of this process that hold statistics of training batches, without noise.

These are metrics that Keras updates with each batch, and the running totals that reports read. No
training code, of any model, may read them.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf


class Totals(Protocol):
    """What keeps running totals of training."""

    @property
    def non_private_variables(self) -> Sequence[tf.Variable]:
        """The variables that follow from examples without noise."""


_MODELS: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_TOTALS: weakref.WeakSet[Totals] = weakref.WeakSet()
_FOUND: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id


def register_statistics(model: keras.Model, totals: Totals) -> None:
    """Adds the metrics of `model`, and the variables of `totals`, to `non_private_variables`."""
    _MODELS.add(model)
    _TOTALS.add(totals)


def non_private_variables() -> list[keras.Variable | tf.Variable]:
    """The statistics without noise of everything that was registered.

    A metric may outlive its model.
    """
    of_models = [v for model in list(_MODELS) for v in metric_variables(model)]
    of_totals = [v for totals in list(_TOTALS) for v in totals.non_private_variables]
    _FOUND.update({id(variable): variable for variable in (*of_models, *of_totals)})
    return list(_FOUND.values())


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of all metrics of a model: statistics of past batches, without noise."""
    compiled, loss = model._compile_metrics, model._compile_loss
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    own = [model._loss_tracker, compiled, *([] if loss is None else loss.metrics)]
    # Some are built with their first batch, and a class may define `metrics` itself.
    metrics = [*own, *model.metrics, *keras.Model.metrics.fget(model), *tf.nest.flatten(given)]
    found = [v for m in metrics if isinstance(m, keras.metrics.Metric) for v in m.variables]
    return list({id(variable): variable for variable in found}.values())
