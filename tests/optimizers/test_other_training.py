"""A statement names all that trained its weights: other plans, and training without privacy.

Also where it was another model's, or another optimizer's, that shares variables with this one.
"""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import training_history, with_other_training
from tests.training_cases import plan_for

IDS, LABELS = np.arange(8, dtype=np.int32) % 5, np.ones((8, 1), np.float32)
ALSO, WITHOUT = (
    "also trained under another plan, for 2 of its 4 steps",
    "also trained without privacy",
)


def head(table: keras.layers.Layer) -> keras.Model:
    """A model of its own on a table that others may have, too."""
    ids = keras.Input((), dtype="int32")
    return keras.Model(ids, keras.layers.Dense(1)(table(ids)))


def table() -> keras.layers.Layer:
    return keras.layers.Embedding(5, 2)


def under_a_plan(
    model: keras.Model, make: Callable[[Any], Any] = lambda plan: plan, steps: int = 2
) -> None:
    plan = make(plan_for(8, steps=4, noise_multiplier=1.0))
    model.compile(dp_sparse.DPSGDOptimizer("adam", plan, 1.0), loss="mse")
    if steps:
        model.fit(plan.sampling.batches((IDS, LABELS)), steps_per_epoch=steps, verbose=0)


def not_private(plan: dp_sparse.PrivacyPlan) -> dp_sparse.PrivacyPlan:
    return dp_sparse.not_private_plan(plan, 7)


def by_fit(model: keras.Model, optimizer: Any = "sgd") -> None:
    """Without privacy."""
    model.compile(optimizer, loss="mse")
    model.fit(IDS, LABELS, verbose=0)


def by_fit_with_a_loss_scale(model: keras.Model) -> None:
    by_fit(model, keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))


def by_fit_with_accumulation(model: keras.Model) -> None:
    by_fit(model, keras.optimizers.SGD(gradient_accumulation_steps=4))


def by_fit_of_two_optimizers(model: keras.Model) -> None:
    by_fit(model, two_optimizers(model))


def by_a_tape(model: keras.Model) -> None:
    """A loop of the user's own over TensorFlow's variables."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(IDS) - LABELS))
    variables = tape.watched_variables()
    gradients = tape.gradient(loss, variables)
    keras.optimizers.SGD().apply_gradients(zip(gradients, variables, strict=True))


def two_optimizers(model: keras.Model) -> keras.optimizers.Optimizer:
    """One for the table, and one for the rest."""
    of_table, others = keras.optimizers.SGD(), keras.optimizers.Adam()
    first = model.trainable_variables[0].path
    return keras.optimizers.MultiOptimizer(lambda v: of_table if v.path == first else others)


def by_a_loop(model: keras.Model) -> None:
    """One of the user's own, without `compile`."""
    gradients = [np.ones(variable.shape, np.float32) for variable in model.trainable_variables]
    keras.optimizers.SGD().apply(gradients, model.trainable_variables)


def said(model: keras.Model) -> str:
    """What else a statement of the model's plan says."""
    return with_other_training("", model.variables, [model.optimizer.plan.run_id])


def test_nothing_is_said_of_its_own_plan() -> None:
    """Neither of the optimizer that the private one wraps, nor of one that took no step."""
    model = head(table())
    model.compile("adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    under_a_plan(model)
    assert said(model) == ""
    again = dp_sparse.DPSGDOptimizer(two_optimizers(model), model.optimizer.plan, 1.0)
    model.compile(again, loss="mse")
    model.fit(again.plan.sampling.batches((IDS, LABELS)), steps_per_epoch=1, verbose=0)
    assert said(model) == ""


def on_a_table_that_was_trained() -> keras.Model:
    shared = table()
    under_a_plan(head(shared))
    later = head(shared)
    under_a_plan(later)
    return later


def before_another_model() -> keras.Model:
    shared = table()
    first, second = head(shared), head(shared)
    under_a_plan(first)
    under_a_plan(second)
    return first


def of_the_same_layers() -> keras.Model:
    first = head(table())
    under_a_plan(first)
    second = keras.Model(first.inputs, first.outputs)
    under_a_plan(second)
    return second


def compiled_again() -> keras.Model:
    model = head(table())
    under_a_plan(model)
    under_a_plan(model, steps=0)
    return model


@pytest.mark.parametrize(
    "make", [on_a_table_that_was_trained, before_another_model, of_the_same_layers, compiled_again]
)
def test_another_plan_is_named_once(make: Callable[[], keras.Model]) -> None:
    text = said(make())
    assert text.count(ALSO) == 1 and WITHOUT not in text


def test_models_without_common_weights_do_not_matter() -> None:
    others = head(table()), head(table()), head(table())
    under_a_plan(others[0])
    by_fit(others[1])
    under_a_plan(others[2], not_private)
    model = head(table())
    under_a_plan(model, steps=0)
    model.optimizer.build(model.trainable_variables)
    assert said(model) == ""


@pytest.mark.parametrize(
    "train",
    [
        by_fit,
        by_fit_with_a_loss_scale,
        by_fit_with_accumulation,
        by_fit_of_two_optimizers,
        by_a_loop,
        by_a_tape,
    ],
)
@pytest.mark.parametrize("when", ["before", "between", "after, another model"])
def test_training_without_privacy_is_named_once(when: str, train: Any) -> None:
    shared = table()
    model, other = head(shared), head(shared)
    if when == "before":
        train(model)
    under_a_plan(model)
    private = model.optimizer
    if when == "between":
        train(model)
    if when == "after, another model":
        train(other)
    model.compile(private, loss="mse")
    text = said(model)
    assert text.count(WITHOUT) == 1 and ALSO not in text


def test_an_optimizer_that_trained_before_it_was_wrapped_is_named() -> None:
    model, adam = head(table()), keras.optimizers.Adam()
    by_fit(model, adam)
    plan = plan_for(8, steps=4, noise_multiplier=1.0)
    model.compile(dp_sparse.DPSGDOptimizer(adam, plan, 1.0), loss="mse")
    model.fit(plan.sampling.batches((IDS, LABELS)), verbose=0)
    assert WITHOUT in said(model)


def test_training_of_what_is_frozen_now_is_named() -> None:
    shared = table()
    by_fit(head(shared))
    shared.trainable = False
    model = head(shared)
    under_a_plan(model)
    assert WITHOUT in said(model)


def test_an_optimizer_that_the_hook_did_not_see_is_named(monkeypatch: Any) -> None:
    """As one that was built before the package was imported."""
    model = head(table())
    monkeypatch.setattr(training_history, "record", lambda optimizer: None)
    by_fit(model)
    monkeypatch.undo()
    under_a_plan(model)
    assert WITHOUT in said(model)


def test_a_plan_with_too_little_noise_is_no_privacy() -> None:
    shared = table()
    first, second = head(shared), head(shared)
    under_a_plan(first)
    under_a_plan(second, lambda plan: dataclasses.replace(plan, noise_multiplier=1e-4))
    assert WITHOUT in said(first) and ALSO not in said(first)


def test_two_optimizers_of_one_plan_are_named_once() -> None:
    shared = table()
    first, second = head(shared), head(shared)
    under_a_plan(first)
    plan = first.optimizer.plan
    first.compile(dp_sparse.DPSGDOptimizer("adam", plan, 1.0), loss="mse")
    first.fit(plan.sampling.batches((IDS, LABELS)), verbose=0)
    under_a_plan(second, steps=0)
    second.optimizer.build(second.trainable_variables)
    assert (
        said(second).count("under another plan, for 4 of its 4 steps") == 1
        and said(second).count("\n") == 1
    )


def test_noise_that_is_known_is_refused_when_another_model_is_compiled() -> None:
    shared = table()
    under_a_plan(head(shared), not_private)
    with pytest.raises(PrivacyError, match="make the model anew"):
        under_a_plan(head(shared), steps=0)


def test_noise_that_is_known_is_refused_when_another_model_trains() -> None:
    shared = table()
    first, second = head(shared), head(shared)
    under_a_plan(second, steps=0)
    under_a_plan(first, not_private)
    batches = second.optimizer.plan.sampling.batches((IDS, LABELS))
    with pytest.raises(PrivacyError, match="make the model anew"):
        second.fit(batches, verbose=0)


def test_noise_that_is_known_is_no_privacy_for_a_statement() -> None:
    shared = table()
    first, second = head(shared), head(shared)
    under_a_plan(first)
    under_a_plan(second, not_private)
    assert WITHOUT in said(first) and ALSO not in said(first)


def test_weights_are_not_kept_alive() -> None:
    model = head(table())
    under_a_plan(model)
    of_table = weakref.ref(model.trainable_variables[0])
    del model
    keras.backend.clear_session()
    gc.collect()
    assert of_table() is None
    later = head(table())
    keras.optimizers.SGD().build(later.trainable_variables)
    assert all(any(ref() is not None for ref in each.variables) for each in training_history._KNOWN)
