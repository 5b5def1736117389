"""Which batches are looked at before they train, and with which trace."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core.errors import PrivacyError
from dp_sparse.step import Schedule
from tests.guards.test_isolation import MIXES, MIXING, N, fit, private_model
from tests.training_cases import checks_of, marked_dataset, plan_for


@pytest.mark.slow
def test_a_second_fit_is_refused_too() -> None:
    model = private_model(MIXING["mean"])
    for _ in range(2):
        with pytest.raises(PrivacyError, match=MIXES):
            fit(model)


@pytest.mark.slow
def test_a_mixing_loss_after_recompiling_is_found() -> None:
    model = private_model()
    fit(model)

    def against_the_batch(y: tf.Tensor, prediction: tf.Tensor) -> tf.Tensor:
        return tf.square(prediction - tf.reduce_mean(y, axis=0))

    model.compile(optimizer=model.optimizer, loss=against_the_batch)
    with pytest.raises(PrivacyError, match=MIXES):
        fit(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("batch", [1, 2])
def test_each_of_the_first_batches_is_checked(batch: int) -> None:
    """A branch that opens in a later one of the first three batches is found there."""
    mixes = tf.Variable(False, trainable=False)
    model = private_model(lambda x: tf.cond(mixes, lambda: x - tf.reduce_mean(x, 0), lambda: x))
    data = np.ones((N, 3), np.float32) * np.arange(N)[:, None] / N, np.ones((N, 1), np.float32)
    batches = iter(model.optimizer.plan.sampling.batches(data))
    for _ in range(batch):
        model.fit(tf.data.Dataset.from_tensors(next(batches)), verbose=0)
    mixes.assign(True)
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(tf.data.Dataset.from_tensors(next(batches)), verbose=0)


def test_the_schedule() -> None:
    """Three checks in the first 256 batches, then one; a batch without examples proves nothing."""
    model, plan = private_model(), plan_for(2, steps=400, capacity=2)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    batch = np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)
    for steps, present, checks in ((5, [0, 0], 0), (250, [1, 0], 3), (2, [1, 1], 4)):
        model.fit(marked_dataset(plan, *batch, steps=steps, present=present), verbose=0)
        assert checks_of(model) == checks
    assert model.train_step.preflight.schedule.batches == 257


@pytest.mark.parametrize(("together", "steps"), [(1, 12), (3, 12), (1, 1)])
def test_no_batch_is_lost_and_each_trains_once(together: int, steps: int) -> None:
    """Also of a source that can be read once, and where one call takes several steps."""
    size = 4 * steps
    sampling = dp_sparse.StreamSampling(num_examples=size, batch_size=4)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling).calibrate()
    model = private_model()
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0)
    model.compile(optimizer, loss="mse", steps_per_execution=together)
    x = np.random.default_rng(0).normal(size=(size, 3)).astype(np.float32)
    left = iter([(own, own[:1]) for own in x])
    spec = tf.TensorSpec([3], tf.float32), tf.TensorSpec([1], tf.float32)
    source = tf.data.Dataset.from_generator(lambda: left, output_signature=spec)
    model.fit(sampling.batches(source), verbose=0)
    assert int(optimizer.steps_spent) == steps and int(optimizer.diagnostics.examples) == size
    assert checks_of(model) == min(steps, 3)
    assert model.train_step.preflight.schedule.batches == steps


def test_a_loop_of_ones_own_looks_first() -> None:
    model, plan = private_model(), plan_for(4)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    first, second = marked_dataset(plan, x, y, steps=2)
    step = tf.function(model.train_step, autograph=False)
    with pytest.raises(PrivacyError, match="no check has seen.*float32"):
        step(first)
    dp_sparse.preflight(model, first)
    step(first)
    step(second)
    assert int(model.optimizer.steps_spent) == 2
    with pytest.raises(ValueError, match="a batch of the plan's sampler, got tuple"):
        dp_sparse.preflight(model, (x, y))
    with pytest.raises(PrivacyError, match="compiled with a private optimizer"):
        dp_sparse.preflight(keras.Sequential([keras.layers.Dense(1)]), first)


def test_a_step_traced_anew_is_checked_anew() -> None:
    """Examples of another length run other code."""

    def mixing_unless_of_four(x: tf.Tensor) -> tf.Tensor:
        return x if x.shape[1] == 4 else x - tf.reduce_mean(x, 0)

    inputs = keras.Input((None, 3))
    hidden = keras.layers.Dense(4)(keras.layers.Lambda(mixing_unless_of_four)(inputs))
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(hidden))
    plan = plan_for(4)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x, y = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32), np.ones((4, 4))
    model.fit(marked_dataset(plan, x[:, :4], y.astype(np.float32), steps=4), verbose=0)
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x, y.astype(np.float32)), verbose=0)


class Switched(keras.layers.Layer):
    mixes = False

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs - tf.reduce_mean(inputs, 0) if self.mixes else inputs


@pytest.mark.parametrize("compiled", [{}, {"jit_compile": True}, {"run_eagerly": True}])
def test_a_batch_of_another_size_is_checked_with_a_new_trace(compiled: dict[str, bool]) -> None:
    """As the step is traced for it, what Python then does differently is seen."""
    layer, plan = Switched(), plan_for(8)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse", **compiled)
    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), np.ones((8, 1))
    y = y.astype(np.float32)
    model.fit(marked_dataset(plan, x, y, steps=4), verbose=0)
    layer.mixes = True
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x[:6], y[:6], steps=4), verbose=0)
    assert int(model.optimizer.steps_spent) == 4


def test_batches_of_numpy_arrays_are_looked_at() -> None:
    model, plan = private_model(), plan_for(4, steps=9)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x, y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
    first, second, *_ = marked_dataset(plan, x, y, steps=9).as_numpy_iterator()
    model.train_on_batch(*first)
    dp_sparse.preflight(model, second)
    assert int(model.optimizer.steps_spent) == 1 and checks_of(model) == 2


def test_run_eagerly_that_is_switched_on_later_changes_nothing() -> None:
    model, plan = private_model(MIXING["mean"]), plan_for(N)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x, y = np.random.default_rng(0).normal(size=(N, 3)), np.ones((N, 1), np.float32)
    x = x.astype(np.float32)
    model.fit(marked_dataset(plan, x, y, present=[0] * N), verbose=0)
    model.run_eagerly = True
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x, y, steps=3), verbose=0)


def test_all_batches_of_one_call_are_looked_at() -> None:
    """The first of them may have no example."""
    model, plan = private_model(MIXING["mean"]), plan_for(N)
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0)
    model.compile(optimizer, loss="mse", steps_per_execution=3)
    x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
    y = np.ones((N, 1), np.float32)
    empty = marked_dataset(plan, x, y, present=[0] * N)
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(empty.concatenate(marked_dataset(plan, x, y, steps=2)), verbose=0)


def test_the_first_check_and_the_first_later_one_take_whole_batches() -> None:
    schedule, whole = Schedule(), []
    for _ in range(6):
        whole.append(schedule.turns_whole)
        schedule.passed()
    assert whole == [True, False, False, True, False, False]
