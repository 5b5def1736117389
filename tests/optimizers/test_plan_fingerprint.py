"""Steps spent under one plan are never counted as another's."""

import contextlib
import copy
import dataclasses
import secrets
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse

SAMPLING = dp_sparse.PoissonSampling(num_examples=8, expected_batch_size=4, steps=9)
DATA = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def plan_of(noise_multiplier: float) -> dp_sparse.PrivacyPlan:
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), SAMPLING)
    return dataclasses.replace(
        plan, noise_multiplier=noise_multiplier, plan_id=secrets.token_hex(16)
    )


def compiled(plan: dp_sparse.PrivacyPlan) -> keras.Model:
    keras.utils.clear_session()  # names as a new process gives them
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.Adagrad(0.1), plan, clip_norm=1.0)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def built(plan: dp_sparse.PrivacyPlan) -> keras.Model:
    model = compiled(plan)
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: keras.Model, steps: int = 1) -> None:
    batches = model.optimizer.plan.sampling.batches(DATA)
    model.fit(batches, steps_per_epoch=steps, verbose=0)


@pytest.fixture(scope="module")
def trained() -> keras.Model:
    """Two steps at σ = 0.6."""
    model = compiled(plan_of(0.6))
    fit(model, 2)
    return model


def checkpoint(trained: keras.Model, folder: Path, make: Any) -> keras.Model:
    path = tf.train.Checkpoint(model=trained).write(str(folder / "checkpoint"))
    model = make()
    tf.train.Checkpoint(model=model).read(path)
    return model


def deferred_checkpoint(trained: keras.Model, folder: Path, make: Any) -> keras.Model:
    """Restored before there is an optimizer, which gets its values as it is made."""
    path = tf.train.Checkpoint(model=trained).write(str(folder / "checkpoint"))
    compiled_later = make(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model = next(compiled_later)
    tf.train.Checkpoint(model=model).read(path)
    next(compiled_later)
    return model


def state_tree(trained: keras.Model, folder: Path, make: Any) -> keras.Model:
    """As an Orbax checkpoint keeps it."""
    del folder
    tree, model = trained.get_state_tree("numpy_array"), make()
    model.set_state_tree(tree)
    return model


def optimizer_weights(trained: keras.Model, folder: Path, make: Any) -> keras.Model:
    del folder
    model = make()
    model.set_weights(trained.get_weights())
    model.optimizer.set_weights([variable.numpy() for variable in trained.optimizer.variables])
    return model


def one_by_one(trained: keras.Model, folder: Path, make: Any) -> keras.Model:
    del folder
    model = make()
    for own, saved in zip(model.optimizer.variables, trained.optimizer.variables, strict=True):
        own.assign(saved)
    return model


def later(plan: dp_sparse.PrivacyPlan) -> Any:
    """A model that is compiled at the second call."""

    def steps(model: keras.Model) -> Any:
        yield model
        optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.Adagrad(0.1), plan, clip_norm=1.0)
        model.compile(optimizer=optimizer, loss="mse")
        yield

    return steps


WAYS = [checkpoint, deferred_checkpoint, state_tree, optimizer_weights, one_by_one]


def restored(way: Any, trained: keras.Model, folder: Path, plan: Any) -> keras.Model:
    make = later(plan) if way is deferred_checkpoint else lambda: built(plan)
    return way(trained, folder, make)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_another_plan_goes_on_in_no_way(
    way: Any, trained: keras.Model, tmp_path: Path
) -> None:
    """Its steps had less noise than this plan's statement says of them."""
    model = restored(way, trained, tmp_path, plan_of(3.0))
    before = [np.array(weight) for weight in model.weights]
    with pytest.raises(dp_sparse.PrivacyError, match="given 2 steps spent under another plan"):
        fit(model)
    for old, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, weight)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_the_same_guarantee_goes_on(
    way: Any, trained: keras.Model, tmp_path: Path
) -> None:
    model = restored(way, trained, tmp_path, plan_of(0.6))
    fit(model)
    assert int(model.optimizer.steps_spent) == 3
    fit(model)
    assert int(model.optimizer.steps_spent) == 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["steps_spent", "steps_seal"])
def test_a_count_restored_in_part_is_refused(name: str, trained: keras.Model) -> None:
    """The seal binds the steps to the plan: one alone says nothing about what was spent."""
    model = built(plan_of(3.0))
    fit(model)
    (saved,) = (v for v in trained.optimizer.variables if v.name == name)
    (own,) = (v for v in model.optimizer.variables if v.name == name)
    own.assign(saved)
    with pytest.raises(dp_sparse.PrivacyError, match="steps_spent and steps_seal go together"):
        fit(model)


@pytest.mark.slow
def test_an_unbuilt_optimizer_or_another_loses_no_steps(trained: keras.Model) -> None:
    tree = trained.get_state_tree("numpy_array")
    model = compiled(plan_of(0.6))
    model.set_state_tree(tree)
    assert int(model.optimizer.steps_spent) == 2
    tree["optimizer_variables"]["another"] = tree["optimizer_variables"].pop("DPSGDOptimizer")
    model = built(plan_of(0.6))
    before = [np.array(weight) for weight in model.weights]
    with pytest.raises(dp_sparse.PrivacyError, match="the spent steps would be lost"):
        model.set_state_tree(tree)
    for old, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, weight)
    model.compile("sgd", "mse")
    model.set_state_tree({"trainable_variables": tree["trainable_variables"]})


@pytest.mark.slow
def test_a_copy_of_a_model_shares_its_steps(trained: keras.Model) -> None:
    model = compiled(plan_of(0.6))
    fit(model, 8)
    twin = copy.deepcopy(model)
    assert twin.optimizer.steps_left == 1
    with pytest.warns(UserWarning, match="all 9 steps of the plan are spent"):
        fit(twin, 2)
    with pytest.raises(dp_sparse.PrivacyError, match="no steps left: 9 of 9"):
        fit(twin, 1)
    with pytest.raises((ValueError, dp_sparse.PrivacyError), match="spent steps would be lost"):
        copy.deepcopy(model.optimizer)


def test_weights_of_another_plan_are_refused(trained: keras.Model, tmp_path: Path) -> None:
    trained.save_weights(tmp_path / "w.weights.h5")
    model = built(plan_of(3.0))
    with pytest.raises(Exception, match="spent 2 steps under another plan"):
        model.load_weights(tmp_path / "w.weights.h5")
    same = built(plan_of(0.6))
    same.load_weights(tmp_path / "w.weights.h5")
    assert int(same.optimizer.steps_spent) == 2
    fit(same)
    assert int(same.optimizer.steps_spent) == 3


@pytest.mark.filterwarnings("ignore:.*could not be loaded:UserWarning")
def test_a_refusal_that_keras_passes_over_stands(trained: keras.Model, tmp_path: Path) -> None:
    """`skip_mismatch` loads the weights without the steps; no step follows until both are there."""
    trained.save_weights(tmp_path / "w.weights.h5")
    model = built(plan_of(3.0))
    with contextlib.suppress(Exception):
        model.load_weights(tmp_path / "w.weights.h5", skip_mismatch=True)
    with pytest.raises(dp_sparse.PrivacyError, match="restored in part"):
        fit(model)


@pytest.mark.slow
def test_weights_load_with_their_steps_into_a_model_that_was_only_compiled(
    trained: keras.Model, tmp_path: Path
) -> None:
    trained.save_weights(tmp_path / "w.weights.h5")
    model = compiled(plan_of(0.6))
    model.load_weights(tmp_path / "w.weights.h5", skip_mismatch=True)
    assert int(model.optimizer.steps_spent) == 2
    fit(model)
    assert int(model.optimizer.steps_spent) == 3


@pytest.mark.parametrize("clip_norm", [1e-42, 1e-13, 1e13])
def test_clip_norms_that_float32_cannot_noise_are_refused(clip_norm: float) -> None:
    sampling = dp_sparse.StreamSampling(num_examples=50, batch_size=10)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling).calibrate()
    with pytest.raises(ValueError, match=r"Expected 1e-12 <= clip_norm <= 1e\+12, got"):
        dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=clip_norm)
