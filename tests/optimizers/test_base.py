"""What all private optimizers share: validation, proxies, configuration, moving averages."""

import copy
import dataclasses
import pickle
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import PrivacyError
from tests.training_cases import click_model, clicks, marked_dataset, plan_for, weights_of

BOTH = pytest.mark.parametrize("make", [dp_sparse.DPAdaFESTOptimizer, dp_sparse.DPSGDOptimizer])


def compiled(optimizer: Any) -> keras.Model:
    model = click_model()
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    return model


@BOTH
@pytest.mark.parametrize("clip_norm", [0, -1.0, float("nan"), float("inf"), None, "1", True])
def test_bad_clip_norm_is_named(make: Any, clip_norm: Any) -> None:
    with pytest.raises(ValueError, match="Expected clip_norm > 0") as caught:
        make("sgd", plan_for(8), clip_norm)
    assert f"got clip_norm={clip_norm!r}." in str(caught.value)


@BOTH
def test_an_uncalibrated_plan_is_refused(make: Any) -> None:
    plan = dataclasses.replace(plan_for(8), noise_multiplier=None)
    with pytest.raises(ValueError, match="Expected a calibrated PrivacyPlan") as caught:
        make("sgd", plan, 1.0)
    assert "use plan.calibrate()" in str(caught.value)
    with pytest.raises(ValueError, match="got plan=None"):
        make("sgd", None, 1.0)


@BOTH
@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "loss_scale_factor"])
def test_wrapped_optimizers_that_couple_steps_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"Expected an optimizer without {name}, got {name}=4"):
        make(keras.optimizers.SGD(0.1, **{name: 4}), plan_for(8), 1.0)


@BOTH
def test_only_plain_keras_optimizers_are_wrapped(make: Any) -> None:
    plan = plan_for(8)
    for wrong in (
        make("sgd", plan, 1.0),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
        3,
    ):
        with pytest.raises(
            ValueError, match="plain Keras optimizer to wrap.*: use one of keras.optimizers"
        ):
            make(wrong, plan, 1.0)
        with pytest.raises(
            ValueError, match="plain Keras optimizer to wrap.*: use one of keras.optimizers"
        ):
            dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, table_optimizer=wrong)


@pytest.mark.cases(1)
@BOTH
def test_learning_rate_and_iterations_are_the_wrapped_optimizers(make: Any) -> None:
    x, y = clicks(8)
    plan = plan_for(8)
    optimizer = make(keras.optimizers.SGD(0.5), plan, 1.0)
    model = compiled(optimizer)
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == float(optimizer.optimizer.learning_rate) == 0.25
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=3, verbose=0)
    assert int(optimizer.iterations) == int(optimizer.optimizer.iterations) == 3


@pytest.mark.cases(1)
@BOTH
def test_a_schedule_is_followed(make: Any) -> None:
    """lr 1, then 0: the second step moves nothing, tables included."""
    x, y = clicks(8)
    plan = plan_for(8, noise_multiplier=0.5)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.0])
    model = compiled(make(keras.optimizers.SGD(schedule), plan, 1.0))
    start = weights_of(model)
    model.fit(marked_dataset(plan, x, y), verbose=0)
    after_one = weights_of(model)
    assert all(np.any(a != b) for a, b in zip(start, after_one, strict=True))
    assert float(model.optimizer.learning_rate) == 0.0
    model.fit(marked_dataset(plan, x, y), verbose=0)
    for one, two in zip(after_one, weights_of(model), strict=True):
        np.testing.assert_array_equal(one, two)


@BOTH
def test_configuration_round_trip(make: Any) -> None:
    plan = plan_for(8)
    optimizer = make(keras.optimizers.Adagrad(0.3), plan, 1.5, name="mine")
    for twin in (
        make.from_config(optimizer.get_config()),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer)),
    ):
        assert type(twin) is make
        assert twin.plan == plan
        assert (twin.clip_norm, twin.name) == (1.5, "mine")
        assert isinstance(twin.optimizer, keras.optimizers.Adagrad)
        assert float(twin.learning_rate) == pytest.approx(0.3)
        assert twin.get_config() == optimizer.get_config()
        assert twin._account.noise_key._key.numpy() != optimizer._account.noise_key._key.numpy()


def test_the_key_is_in_no_copy() -> None:
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan_for(8), 1.0)
    key = optimizer._account.noise_key
    for twin in (copy.deepcopy(key), pickle.loads(pickle.dumps(key))):
        assert twin._key.numpy() != key._key.numpy()


@BOTH
def test_building_without_a_model_says_compile(make: Any) -> None:
    model = click_model()
    with pytest.raises(PrivacyError, match=r"pass it to model.compile\(optimizer=...\)"):
        make("sgd", plan_for(8), 1.0).build(model.trainable_variables)


@BOTH
def test_variables_are_its_own_and_the_wrapped_optimizers(make: Any) -> None:
    optimizer = make(keras.optimizers.Adagrad(0.1), plan_for(8), 1.0)
    model = compiled(optimizer)
    optimizer.build(model.trainable_variables)
    optimizer.build(model.trainable_variables)  # twice changes nothing
    paths = [variable.path for variable in optimizer.variables]
    assert sum("accumulator" in path for path in paths) == len(model.trainable_variables)
    assert sum(path.endswith("steps_spent") for path in paths) == 1
    ids = [id(variable) for variable in optimizer.variables]
    assert len(ids) == len(set(ids))
    assert not set(ids) & {id(variable) for variable in model.variables}


@BOTH
def test_it_is_no_stock_optimizer_by_isinstance(make: Any) -> None:
    """keras-rs maps SGD, Adagrad and Adam to plain hardware updates by isinstance."""
    stock = (keras.optimizers.SGD, keras.optimizers.Adagrad, keras.optimizers.Adam)
    assert not issubclass(make, stock)


@pytest.mark.cases(1)
@BOTH
def test_moving_average_of_dense_variables_only(make: Any) -> None:
    x, y = clicks(8)
    plan = plan_for(8, noise_multiplier=0.5)
    dense = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    arguments: Any = {"table_optimizer": keras.optimizers.SGD(0.5)}
    if make is dp_sparse.DPSGDOptimizer:
        arguments = {}
    model = compiled(make(dense, plan, 1.0, **arguments))
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(weights_of(model))
    )
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=3, verbose=0, callbacks=[watch])
    average = seen[0]
    for weights in seen[1:]:
        average = [0.5 * a + 0.5 * w for a, w in zip(average, weights, strict=True)]
    tables = {id(table) for table in model.optimizer.tables}
    for variable, a, last in zip(model.trainable_variables, average, seen[-1], strict=True):
        averaged = make is dp_sparse.DPSGDOptimizer or id(variable) not in tables
        np.testing.assert_allclose(np.array(variable), a if averaged else last, atol=1e-5)


@BOTH
def test_dense_constraints_hold(make: Any) -> None:
    plan = plan_for(8, noise_multiplier=0.5)
    layer = keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.1))
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile(optimizer=make(keras.optimizers.SGD(50.0), plan, 1.0), loss="mse")
    x, y = np.ones((8, 2), np.float32), np.zeros((8, 3), np.float32)
    model.fit(marked_dataset(plan, x, y, steps=2), verbose=0)
    assert np.all(np.linalg.norm(layer.kernel.numpy(), axis=0) <= 0.1 + 1e-6)


def test_a_finished_fit_leaves_no_table_replaced() -> None:
    """`finalize_variable_values` without an average changes nothing."""
    model = compiled(dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0))
    model.optimizer.build(model.trainable_variables)
    before = weights_of(model)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
