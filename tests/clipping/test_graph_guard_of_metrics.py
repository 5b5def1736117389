"""Metrics in the graph of a step: they write their own variables, and do nothing else."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from dp_sparse import UnsupportedLayerError
from dp_sparse.core.errors import PrivacyError
from tests.clipping.guarded_steps import Calls, model_with, train


class Rereads(keras.metrics.Metric):
    """Its own sum is its business; it also does something else."""

    def __init__(self, also: Callable[[tf.Tensor], Any] = lambda y: None) -> None:
        super().__init__(name="rereads")
        self._also = also
        self.total = self.add_variable((), initializer="zeros", name="total")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.cast(y, tf.float32)))
        tf.cond(self.total > 1e9, lambda: self.total.assign(0.0), lambda: self.total.assign(1.0))
        self._also(y)

    def result(self) -> Any:
        return self.total


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [{}, {"microbatch_size": 2}, {"jit_compile": True}])
def test_metrics_write_their_own_variables(way: dict[str, Any]) -> None:
    metric = Rereads()
    train(model_with(keras.layers.Dense(2)), metrics=[metric, "mae"], **way)
    assert float(metric.total) == 1.0


@pytest.mark.parametrize("way", [{}, {"microbatch_size": 2}, {"jit_compile": True}])
def test_metrics_write_nothing_else(way: dict[str, Any]) -> None:
    model = model_with(keras.layers.Dense(2))
    kept = model.weights[0]
    metric = Rereads(lambda y: kept.value.assign_add(tf.fill(kept.shape, tf.reduce_sum(y))))
    with pytest.raises(PrivacyError, match=r"\(AssignAddVariableOp\): keeps what was computed"):
        train(model, metrics=[metric], **way)


def test_metrics_run_no_python() -> None:
    metric = Rereads(lambda y: tf.py_function(lambda v: v, [y], tf.float32))
    with pytest.raises(PrivacyError, match=r"\(EagerPyFunc\): runs Python code"):
        train(model_with(keras.layers.Dense(2)), metrics=[metric])


def test_a_metric_read_in_the_forward_pass() -> None:
    metric = Rereads()
    layer = Calls(lambda layer, x: x * (1 + metric.total))
    with pytest.raises(UnsupportedLayerError, match="rereads.*a metric's variable"):
        train(model_with(layer), metrics=[metric])
