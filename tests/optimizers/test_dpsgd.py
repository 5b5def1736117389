"""DPSGDOptimizer: any Keras optimizer, tables included."""

from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from tests.training_cases import click_model, clicks, plan_for, weights_of


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.AdamW(0.1, weight_decay=0.01),
        keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        keras.optimizers.RMSprop(0.1, centered=True),
        keras.optimizers.Adam(0.1, clipnorm=1.0),
        "rmsprop",
    ],
    ids=["adamw", "momentum", "rmsprop", "clipnorm", "by name"],
)
def test_any_keras_optimizer(optimizer: Any) -> None:
    x, y = clicks(8)
    plan = plan_for(8, noise_multiplier=0.5)
    model = click_model()
    model.compile(
        optimizer=dp_sparse.DPSGDOptimizer(optimizer, plan, 1.0), loss="binary_crossentropy"
    )
    start = weights_of(model)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    for old, new in zip(start, weights_of(model), strict=True):
        assert np.all(np.isfinite(new))
        assert np.mean(old != new) > 0.9  # every row of every table, looked up or not


def test_table_regularisers_are_dense_here() -> None:
    layer = keras.layers.Embedding(11, 3, embeddings_regularizer=keras.regularizers.L2(0.5))
    model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
    plan = plan_for(8, noise_multiplier=1e-9)
    model.compile(
        optimizer=dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1e-6), loss="mse"
    )
    before = layer.embeddings.numpy()
    x, y = np.zeros((8, 2), np.int32), np.zeros((8, 2, 3), np.float32)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=1, verbose=0)
    np.testing.assert_allclose(layer.embeddings.numpy(), before - 2 * 0.5 * before, atol=1e-5)


def test_which_rows_a_batch_looked_up_is_not_counted() -> None:
    """Under DP-SGD the looked-up rows are private."""
    x, y = clicks(8)
    plan, model = plan_for(8), click_model()
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="binary_crossentropy")
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=1, verbose=0)
    assert not np.any(model.optimizer.diagnostics.rows.numpy())
