"""`fit` shares the plan's steps over its epochs, and never dies after the last one was paid."""

import dataclasses
import secrets
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import distribution
from dp_sparse.core import PrivacyError
from tests.training_cases import plan_for

X, Y = np.arange(64) % 10, np.ones(64, np.float32)


class Epochs(keras.callbacks.Callback):
    """Counts the steps that each epoch spent, and what the progress bar is told."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.shown: list[int | None] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self.model.optimizer.steps_left
        self.shown.append(self.params["steps"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.steps.append(self._before - self.model.optimizer.steps_left)


def private(steps: int, **compiled: Any) -> tuple[keras.Model, dp_sparse.PrivacyPlan]:
    plan = plan_for(64, steps=steps, noise_multiplier=1.0)
    layers = [keras.Input(()), keras.layers.Embedding(10, 2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse", **compiled)
    return model, plan


def fitted(model: keras.Model, plan: dp_sparse.PrivacyPlan, **arguments: Any) -> Epochs:
    epochs = Epochs()
    callbacks = [*arguments.pop("callbacks", []), epochs]
    batches = plan.sampling.batches((X, Y))
    model.fit(batches, verbose=0, callbacks=callbacks, **arguments)
    return epochs


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("steps", "epochs", "each"),
    [(10, 1, [10]), (10, 3, [3, 3, 4]), (8, 4, [2, 2, 2, 2]), (3, 2, [1, 2])],
)
def test_steps_are_divided_among_epochs(steps: int, epochs: int, each: list[int]) -> None:
    found = fitted(*private(steps), epochs=epochs)
    assert found.steps == found.shown == each


@pytest.mark.slow
def test_whole_executions_are_divided() -> None:
    found = fitted(*private(14, steps_per_execution=4), epochs=2)
    assert found.steps == [4, 10]


def in_epochs(epochs: float, **compiled: Any) -> tuple[keras.Model, dp_sparse.PrivacyPlan]:
    """A model under a plan of so many epochs, of 3.2 steps each."""
    model, _ = private(1)
    sampling = dp_sparse.PoissonSampling(64, 20, epochs=epochs)
    budget = dp_sparse.PrivacyBudget(1.0, 1e-3)
    name = secrets.token_hex(8)
    plan = dp_sparse.PrivacyPlan(budget, sampling, noise_multiplier=9.0, plan_id=name)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse", **compiled)
    return model, plan


def test_epochs_are_those_of_a_plan_that_was_made_in_epochs() -> None:
    model, plan = in_epochs(5)
    assert plan.sampling.steps == 16
    assert fitted(model, plan, epochs=3).steps == [3, 3, 4]
    assert fitted(model, plan, epochs=2).steps == [3, 3]


def test_the_loop_of_workers_has_the_epochs_of_fit() -> None:
    for (model, plan), each in ((in_epochs(5), [3, 3, 4]), (private(10), [3, 3, 4])):
        epochs = Epochs()
        distribution.train(model, (X, Y), epochs=3, callbacks=[epochs], verbose=0)
        assert epochs.steps == epochs.shown == each, plan


def test_an_epoch_that_was_interrupted_ends_where_it_would_have() -> None:
    model, plan = in_epochs(5)
    assert fitted(model, plan, steps_per_epoch=4).steps == [4]
    assert fitted(model, plan, epochs=3).steps == [2, 4, 3]
    assert model.optimizer.steps_left == 3


def test_more_epochs_than_the_plan_has_left_share_them() -> None:
    assert fitted(*in_epochs(2), epochs=3).steps == [2, 2, 2]


def test_fit_without_epochs_takes_the_whole_plan_and_says_so() -> None:
    said = r"all 16 steps .* 5 of the plan's epochs.*steps_per_epoch=3.*epochs=5"
    with pytest.warns(UserWarning, match=said):
        assert fitted(*in_epochs(5)).steps == [16]
    with pytest.warns(UserWarning, match=r"all 10 steps .*epochs=3\."):  # 3 times 3.2, rounded up
        assert fitted(*in_epochs(3)).steps == [10]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*epochs")
        assert fitted(*in_epochs(1)).steps == [3]
        assert fitted(*private(4)).steps == [4]


def test_epochs_of_a_stream_are_its_passes() -> None:
    model, _ = private(1)
    stream = dp_sparse.StreamSampling(64, 32, passes=5)
    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(1.0, 1e-3), stream, noise_multiplier=9.0, plan_id="stream"
    )
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    assert fitted(model, plan, epochs=3).steps == [2, 2, 2]


@pytest.mark.slow
def test_whole_executions_of_the_plans_epochs() -> None:
    model, plan = in_epochs(5, steps_per_execution=2)
    assert fitted(model, plan, epochs=3).steps == [2, 4, 4]
    assert fitted(model, plan, epochs=2).steps == [2, 4]


def test_a_saved_plan_keeps_its_epochs() -> None:
    """Without a change of its name, by which batches and saved state know it."""
    _, plan = in_epochs(5)
    again = dp_sparse.PrivacyPlan.from_config(plan.get_config())
    assert again == plan and again.sampling.steps_per_epoch == 3.2
    in_steps = dp_sparse.PoissonSampling(64, 20, steps=16)
    assert in_steps.steps_per_epoch is None
    assert in_steps.fingerprint == again.sampling.fingerprint
    assert dataclasses.replace(plan, sampling=in_steps).fingerprint == again.fingerprint
    debugged = dp_sparse.not_private_plan(plan, seed=1).sampling
    assert debugged.steps_per_epoch == 3.2


def test_a_run_that_goes_on_divides_what_is_left() -> None:
    model, plan = private(10)
    assert fitted(model, plan, steps_per_epoch=3).steps == [3]
    assert fitted(model, plan, epochs=5, initial_epoch=3).steps == [3, 4]


@pytest.mark.slow
def test_a_restored_run_divides_what_is_left(tmp_path: Path) -> None:
    class Dies(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    model, plan = private(10)
    with pytest.raises(KeyboardInterrupt):
        fitted(model, plan, epochs=3, callbacks=[backup, Dies()])
    again, _ = private(10)
    again.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    assert fitted(again, plan, epochs=3, callbacks=[backup]).steps == [3, 4]


def test_steps_that_fit_is_given_stay() -> None:
    found = fitted(*private(10), epochs=2, steps_per_epoch=3)
    assert found.steps == found.shown == [3, 3]


def test_fewer_batches_an_epoch_stay() -> None:
    model, plan = private(10)
    epochs = Epochs()
    model.fit(plan.sampling.batches((X, Y)).take(2), epochs=3, verbose=0, callbacks=[epochs])
    assert epochs.steps == [2, 2, 2]


def test_training_ends_with_a_warning_where_the_plan_does() -> None:
    model, plan = private(7)
    epochs = Epochs()
    with pytest.warns(UserWarning, match=r"all 7 steps of the plan are spent, and fit asked for"):
        model.fit(
            plan.sampling.batches((X, Y)).repeat(),
            epochs=3,
            steps_per_epoch=5,
            verbose=0,
            callbacks=[epochs],
        )
    assert epochs.steps == [5, 2]
    assert model.predict(X, verbose=0).shape == (64, 1)


def test_training_ends_with_a_warning_where_epochs_are_more_than_steps() -> None:
    with pytest.warns(UserWarning, match="3 of 5 epochs had no step left"):
        assert fitted(*private(2), epochs=5).steps == [1, 1]


def test_a_second_fit_says_what_it_would_cost() -> None:
    model, plan = private(2)
    fitted(model, plan)
    budget = plan.budget
    said = f"epsilon={2 * budget.epsilon:g} and delta={2 * budget.delta:g}"
    with pytest.raises(PrivacyError, match=f"no steps left: 2 of 2.*{said}.*plan.calibrate"):
        fitted(model, plan)


def test_a_step_outside_of_fit_is_an_error() -> None:
    model, plan = private(2)
    fitted(model, plan)
    batch = next(iter(plan.sampling.batches((X, Y))))
    with pytest.raises(PrivacyError, match="no steps left: 2 of 2"):
        model.train_on_batch(*batch)


def test_a_refused_batch_within_the_plan_is_an_error() -> None:
    model, plan = private(5)
    batches = plan.sampling.batches((X, Y)).take(1).cache().repeat()
    with pytest.raises(PrivacyError, match="batch"):
        model.fit(batches, steps_per_epoch=5, epochs=2, verbose=0)


@pytest.mark.slow
def test_a_loop_of_the_package_keeps_its_own_steps() -> None:
    """Also after a fit whose iterator had other steps."""
    sampling = dp_sparse.StreamSampling(64, 8)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()
    model, _ = private(1)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    model.fit(sampling.batches((X, Y)), steps_per_epoch=2, verbose=0)
    epochs = Epochs()
    distribution.train(model, (X, Y), epochs=2, callbacks=[epochs])
    assert epochs.steps == [3, 3]
