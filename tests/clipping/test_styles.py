"""Clipping styles: factors against NumPy, the sensitivity of each, what does not fit a model."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import AutomaticClipping, FlatClipping, PerLayerClipping, QuantileClipping, clipping
from tests.clipping.brute_force import brute_gradients, square_loss
from tests.training_cases import click_model, clicks, marked, plan_for

STYLES = [
    FlatClipping(),
    AutomaticClipping(),
    AutomaticClipping(stability=1.0),
    PerLayerClipping(),
    QuantileClipping(),
]


def two_layers() -> keras.Model:
    keras.utils.set_random_seed(3)
    first = keras.layers.Dense(4, activation="tanh", name="first")
    return keras.Sequential([keras.Input((3,)), first, keras.layers.Dense(2, name="second")])


def sums_of(model: keras.Model, x: Any, y: Any, clip_norm: float, style: Any) -> list[np.ndarray]:
    x = tf.constant(x)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, x, tape, len(y))
        losses = square_loss(y, recording.outputs)
        total = tf.reduce_sum(losses)
    terms = recording.terms(tape.gradient(total, recording.targets))
    found = clipping.scaled(terms, clip_norm, losses, tf.ones(len(y)), style).dense_sums()
    return [found[id(variable)].numpy() for variable in model.trainable_variables]


def reference(gradients: list[list[np.ndarray]], groups: list[int], bounds: Any) -> list[Any]:
    """Σ over examples of each group scaled by `bounds(norm of the group, group)`."""
    sums = [np.zeros_like(part) for part in gradients[0]]
    for example in gradients:
        for group in set(groups):
            mine = [i for i, own in enumerate(groups) if own == group]
            norm = math.sqrt(sum(float(np.sum(example[i] ** 2)) for i in mine))
            for i in mine:
                sums[i] += bounds(norm, group) * example[i]
    return sums


def case() -> tuple[keras.Model, np.ndarray, np.ndarray, list[list[np.ndarray]]]:
    rng = np.random.default_rng(0)
    model, x = two_layers(), rng.normal(size=(6, 3)).astype(np.float32)
    y = rng.normal(size=6).astype(np.float32)
    return model, x, y, brute_gradients(model, x, y)


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_automatic_clipping_normalises() -> None:
    model, x, y, gradients = case()
    found = sums_of(model, x, y, 0.7, AutomaticClipping(stability=0.1))
    expected = reference(gradients, [0, 0, 0, 0], lambda norm, _: 0.7 / (norm + 0.1))
    assert_equal(found, expected)


@pytest.mark.parametrize("shares", [None, {"first": 3.0, "second": 1.0}])
def test_per_layer_clipping_splits_the_square_of_c(shares: dict[str, float] | None) -> None:
    model, x, y, gradients = case()
    bounds = [0.7 * math.sqrt(part) for part in ((0.5, 0.5) if shares is None else (0.75, 0.25))]
    found = sums_of(model, x, y, 0.7, PerLayerClipping(shares))
    expected = reference(
        gradients, [0, 0, 1, 1], lambda norm, group: min(1.0, bounds[group] / norm)
    )
    assert_equal(found, expected)


@settings(max_examples=40, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    scale=st.floats(-6, 6).map(lambda power: 10**power),  # as often below 1 as above it
    ratio=st.floats(-3, 1).map(lambda power: 10**power),
    seed=st.integers(0, 99),
)
@hypothesis.example(style=FlatClipping(), scale=1e-2, ratio=0.1, seed=0)
@hypothesis.example(style=PerLayerClipping(), scale=1e-2, ratio=0.1, seed=0)
def test_one_example_adds_at_most_c(style: Any, scale: float, ratio: float, seed: int) -> None:
    clip_norm = ratio * scale  # about the size of the gradient, which has that of x and y
    rng = np.random.default_rng(seed)
    x = (scale * rng.normal(size=(1, 3))).astype(np.float32)
    found = sums_of(two_layers(), x, np.full(1, scale, np.float32), clip_norm, style)
    assert math.sqrt(sum(float(np.sum(np.float64(part) ** 2)) for part in found)) <= clip_norm


@pytest.mark.cases(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("make", [dp_sparse.DPSGDOptimizer, dp_sparse.DPAdaFESTOptimizer])
def test_every_style_trains_and_is_saved_with_the_optimizer(make: Any, style: Any) -> None:
    model, plan = click_model(), plan_for(8)
    optimizer = make("adagrad", plan, clip_norm=0.3, clipping=style)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    x, y = clicks(8)
    model.train_step(marked(plan, x, y))
    assert int(optimizer.diagnostics.clipped) <= 8
    again = make.from_config(optimizer.get_config())
    assert again.clipping == style


def test_shares_must_name_the_models_layers() -> None:
    model, plan = click_model(), plan_for(8)
    style = PerLayerClipping({"nowhere": 1.0})
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0, clipping=style)
    model.compile(optimizer=optimizer, loss="binary_crossentropy")
    with pytest.raises(ValueError, match=r"Expected shares for the layers .*nowhere"):
        optimizer.build(model.trainable_variables)


def test_shares_of_a_model_from_a_file(tmp_path: Path) -> None:
    """Keras builds it layer by layer, so that its own name is no more in their paths."""
    model, plan = two_layers(), plan_for(4)
    paths = [variable.path.rpartition("/")[0] for variable in model.trainable_variables]
    style = PerLayerClipping(dict.fromkeys(paths, 1.0))
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0, clipping=style)
    model.compile(optimizer=optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert [variable.path.rpartition("/")[0] for variable in again.trainable_variables] != paths
    assert again.optimizer.clipping == style
    style.check(again.trainable_variables)


@pytest.mark.parametrize(
    ("shares", "fits"),
    [
        ({"dense": 1.0}, False),
        ({"dense": 1.0, "x/dense": 1.0}, False),
        ({"a/dense": 1.0, "b/dense": 1.0}, True),
        ({"m/a/dense": 1.0, "b/dense": 1.0}, True),
        ({"a/dense": 1.0}, False),
        ({"a/dense": 1.0, "b/dense": 1.0, "c": 1.0}, False),
        ({"ense": 1.0, "b/dense": 1.0}, False),
        ({}, False),
    ],
)
def test_each_layer_needs_one_name_that_means_it_alone(shares: Any, fits: bool) -> None:
    variables = [SimpleNamespace(path=f"{name}/dense/kernel") for name in "ab"]
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="name each layer"):
        PerLayerClipping(shares).check(variables)  # type: ignore[arg-type]


def test_shares_are_a_mapping() -> None:
    with pytest.raises(ValueError, match=r"got shares=\[1, 2\]"):
        PerLayerClipping([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), "1"])
def test_bad_numbers(bad: Any) -> None:
    with pytest.raises(ValueError, match="stability"):
        AutomaticClipping(stability=bad)
    with pytest.raises(ValueError, match=r"shares\['a'\]"):
        PerLayerClipping({"a": bad})


class Unbounded(FlatClipping):
    def factors(self, variables: Any, squared: Any, clip_norm: Any) -> Any:
        return [100 * factor for factor in super().factors(variables, squared, clip_norm)]


@pytest.mark.parametrize("bad", ["flat", FlatClipping, 1.0, Unbounded()])
def test_what_is_no_style(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"clipping=.*use one of FlatClipping\(\)"):
        dp_sparse.DPSGDOptimizer("sgd", plan_for(8), 1.0, clipping=bad)
