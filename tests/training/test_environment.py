"""Settings of the process: what undoes a step is refused, when it is set and later."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution
from dp_sparse.core.errors import PrivacyError
from dp_sparse.step import environment
from tests.training_cases import click_model, clicks, plan_for, weights_of


@pytest.fixture
def options() -> Iterator[Any]:
    """Sets options of the graph optimizer, for the time of a test."""
    changed: set[str] = set()

    def switch(name: str, on: bool = True) -> None:
        changed.add(name)
        tf.config.optimizer.set_experimental_options({name: on})

    yield switch
    for name in changed:
        tf.config.optimizer.set_experimental_options({name: False})


def compiled(**arguments: Any) -> tuple[keras.Model, Any]:
    model, plan = click_model(), plan_for(8, steps=4, noise_multiplier=1.0)
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0)
    model.compile(optimizer, "binary_crossentropy", **arguments)
    return model, plan.sampling.batches(clicks(8))


HARMFUL = ["debug_stripper", "auto_mixed_precision", "auto_mixed_precision_onednn_bfloat16"]


@pytest.mark.parametrize("name", HARMFUL)
@pytest.mark.parametrize("jit", [False, True])
def test_options_that_undo_a_step_are_refused_by_name(options: Any, name: str, jit: bool) -> None:
    options(name)
    with pytest.raises(PrivacyError, match=f"Expected {name} off, got it on"):
        compiled(jit_compile=jit)
    options(name, False)
    compiled(jit_compile=jit)


def test_between_compile_and_fit_and_between_fits(options: Any) -> None:
    model, batches = compiled()
    options("debug_stripper")
    with pytest.raises(PrivacyError, match="Expected debug_stripper off"):
        model.fit(batches, steps_per_epoch=1, verbose=0)
    options("debug_stripper", False)
    model.fit(batches, steps_per_epoch=1, verbose=0)
    options("debug_stripper")
    with pytest.raises(PrivacyError, match="Expected debug_stripper off"):
        distribution.train(model, clicks(8), steps_per_epoch=1)
    assert int(model.optimizer.steps_spent) == 1


def test_in_a_callback(options: Any) -> None:
    """The step that it was switched on after is the last one."""
    model, batches = compiled()
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: options("debug_stripper")
    )
    with pytest.raises(PrivacyError, match="Expected debug_stripper off"):
        model.fit(batches, callbacks=[callback], verbose=0)
    assert int(model.optimizer.steps_spent) == 1


def test_what_the_options_do_is_noticed_without_their_names(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other pass that drops assertions would be found like this one."""
    monkeypatch.setattr(environment, "_HARMFUL", ())
    environment._check_once.cache_clear()
    compiled()
    options("debug_stripper")
    with pytest.raises(PrivacyError, match="a graph optimizer that drops them"):
        compiled()
    options("debug_stripper", False)
    environment._check_once.cache_clear()
    monkeypatch.setattr(environment, "_rounding", lambda: 2.0**-12)
    with pytest.raises(PrivacyError, match="some rounded to fewer bits"):
        compiled()
    monkeypatch.undo()
    environment._check_once.cache_clear()


def test_rounding_is_measured() -> None:
    assert environment._rounding() < 2.0**-20
    with pytest.MonkeyPatch.context() as patched:
        original = tf.matmul
        patched.setattr(
            tf,
            "matmul",
            lambda a, b, **options: tf.cast(
                original(tf.cast(a, tf.bfloat16), tf.cast(b, tf.bfloat16), **options), tf.float32
            ),
        )
        assert environment._rounding() > 2.0**-12


@pytest.mark.parametrize("floatx", ["float64", "bfloat16", "float16"])
def test_another_default_float_is_refused(floatx: str) -> None:
    keras.config.set_floatx(floatx)
    try:
        with pytest.raises(ValueError, match=f"floatx.. to be float32, got {floatx}"):
            compiled()
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize("policy", ["float64", "bfloat16"])
def test_variables_of_another_dtype_are_refused(policy: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model, batches = compiled()
        weights = weights_of(model)
        with pytest.raises(ValueError, match=f"Expected variables in float32, got .* in {policy}"):
            model.fit(batches, steps_per_epoch=1, verbose=0)
    finally:
        keras.config.set_dtype_policy(before)
    for old, new in zip(weights, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
