"""Runs that end early: by a callback, by hand, by fewer epochs than the plan has."""

import dataclasses
import secrets
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from tests.statements import sentences

X, Y = np.arange(64) % 10, np.ones(64, np.float32)
HELD_OUT = (np.arange(8), np.ones(8, np.float32))


def private(stopping: str = "fixed") -> tuple[keras.Model, dp_sparse.PrivacyPlan]:
    """A small model under a plan of five epochs of four steps each."""
    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(1.0, 1e-3),
        dp_sparse.PoissonSampling(64, expected_batch_size=16, epochs=5),
        noise_multiplier=4.0,
        plan_id=secrets.token_hex(8),
        stopping=stopping,
    )
    layers = [keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    return model, plan


def fit(model: keras.Model, plan: dp_sparse.PrivacyPlan, **arguments: Any) -> int:
    """Trains, and returns the steps that were spent in all."""
    model.fit(plan.sampling.batches((X, Y)), verbose=0, **arguments)
    return int(model.optimizer.steps_spent)


class StopsByHand(keras.callbacks.Callback):
    """Somebody interrupts a run after its third step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 2


class Weights(keras.callbacks.Callback):
    """Keeps the weights of each epoch."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.kept: list[list[np.ndarray]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.kept.append(self.model.get_weights())


def test_early_stopping_restores_weights_and_guarantees_what_all_steps_cost() -> None:
    model, plan = private()
    weights, report = Weights(), dp_sparse.PrivacyReport()
    never_better = keras.callbacks.EarlyStopping(  # than the first epoch
        "val_loss", min_delta=1e9, restore_best_weights=True
    )
    callbacks = [weights, report, never_better]
    assert fit(model, plan, epochs=4, validation_data=HELD_OUT, callbacks=callbacks) == 8
    for found, kept in zip(model.get_weights(), weights.kept[0], strict=True):
        np.testing.assert_array_equal(found, kept)
    promise, if_fixed, *_ = sentences(plan.statement(8))
    assert "after 8 of 20 steps" in promise
    assert float(promise[1 : promise.index(",")]) == pytest.approx(plan.spent(20).epsilon, rel=1e-3)
    assert "if the number of steps was chosen without looking at the run" in if_fixed
    assert report.history.epsilon[-1] == plan.spent(8).epsilon < plan.guaranteed(8).epsilon
    page = report.page()
    assert "after 8 of 20 steps" in page and "stops because of what it saw" in page
    assert fit(model, plan, epochs=4) == 20  # and goes on to the end of the plan


def test_a_run_that_is_stopped_by_hand_goes_on() -> None:
    model, plan = private()
    assert fit(model, plan, callbacks=[StopsByHand()], steps_per_epoch=4) == 3
    promises = [sentences(plan.statement(steps))[0] for steps in (3, 20)]
    assert promises[0] == promises[1].replace("after 20", "after 3")
    assert fit(model, plan, epochs=2) == 8  # the rest of the first epoch, and the second
    assert fit(model, plan, steps_per_epoch=12) == 20
    with pytest.raises(dp_sparse.PrivacyError, match="no steps left: 20 of 20"):
        fit(model, plan)


def test_a_plan_says_of_no_step_that_it_was_taken() -> None:
    _, plan = private()
    assert "over at most 20 steps" in plan.statement()
    begun = sentences(plan.statement(0))[0]
    assert "after 0 of 20 steps" in begun and begun.startswith("(1e-12, 0.001)")


def test_three_epochs_of_a_plan_of_five() -> None:
    model, plan = private()
    assert fit(model, plan, epochs=3) == 12
    assert "after 12 of 20 steps" in plan.statement(12)
    assert fit(model, plan, epochs=2) == 20


def test_a_run_that_may_stop_at_any_time_is_guaranteed_its_own_steps() -> None:
    model, plan = private("any time")
    steps = fit(model, plan, callbacks=[StopsByHand()], steps_per_epoch=4)
    guaranteed = plan.guaranteed(steps)
    assert guaranteed == plan.spent(3) and guaranteed.epsilon < plan.spent(20).epsilon
    assert "This holds whatever rule stops the run" in sentences(plan.statement(steps))[1]
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    assert optimizer.plan.guaranteed(steps) == guaranteed
    fixed = dataclasses.replace(plan, stopping="fixed")
    assert fixed.spent(steps).epsilon < guaranteed.epsilon < fixed.guaranteed(steps).epsilon
