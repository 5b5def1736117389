"""Quantile-adaptive clipping: where C goes, what its count costs, that it is saved."""

import math
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dp_sparse
from dp_sparse import QuantileClipping, noise
from dp_sparse.optimizers.release import MovingClipNorm
from tests.training_cases import (
    click_model,
    clicks,
    marked_dataset,
    plan_for,
)

OPTIMIZERS = [dp_sparse.DPSGDOptimizer, dp_sparse.DPAdaFESTOptimizer]


def clip_norm_of(optimizer: Any) -> float:
    return float(optimizer.current_clip_norm)


def linear_model() -> keras.Model:
    """Its gradient has the norm of the input: the loss is the output."""
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])


def output(y: tf.Tensor, prediction: tf.Tensor) -> tf.Tensor:
    return prediction[:, 0]


def inputs_of_norm(norms: np.ndarray) -> np.ndarray:
    angles = np.random.default_rng(0).uniform(0, 2 * np.pi, len(norms))
    return (norms[:, np.newaxis] * np.stack([np.cos(angles), np.sin(angles)], 1)).astype(np.float32)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("noise_ratio", [1.1, 10.0])
def test_the_parts_add_up_to_the_plans_noise_multiplier(make: Any, noise_ratio: float) -> None:
    plan = plan_for(8, noise_multiplier=1.3)
    style = QuantileClipping(noise_ratio=noise_ratio)
    optimizer = make("sgd", plan, 1.0, clipping=style)
    of_gradients, of_count = style.noise_multipliers(1.3)
    assert of_gradients**-2 + of_count**-2 == pytest.approx(1.3**-2)
    assert of_count == pytest.approx(1.3 * noise_ratio)
    assert optimizer.noise_multiplier == pytest.approx(of_gradients)
    if make is dp_sparse.DPAdaFESTOptimizer:
        parts = optimizer.contribution_noise_multiplier, optimizer.gradient_noise_multiplier
        assert sum(part**-2 for part in parts) == pytest.approx(of_gradients**-2)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_c_becomes_the_quantile(quantile: float, microbatch_size: int | None) -> None:
    norms = np.exp(np.random.default_rng(1).normal(size=40))
    x, steps = inputs_of_norm(norms), 300
    plan = plan_for(40, steps=steps)
    style = QuantileClipping(target_quantile=quantile, learning_rate=0.1)
    optimizer = dp_sparse.DPSGDOptimizer(
        keras.optimizers.SGD(0.0), plan, 30.0, clipping=style, microbatch_size=microbatch_size
    )
    model = linear_model()
    model.compile(optimizer=optimizer, loss=output)
    model.fit(marked_dataset(plan, x, np.zeros(40, np.float32), steps=steps), verbose=0)
    low, high = np.quantile(norms, [quantile - 0.05, quantile + 0.05])
    assert low <= clip_norm_of(optimizer) <= high


@pytest.mark.usefixtures("no_noise")
def test_padding_and_examples_that_are_not_finite() -> None:
    """Padding counts for nothing; what is zeroed counts as clipped; division is by B."""
    x = inputs_of_norm(np.array([0.1, 0.5, 2.0, 0.5, 1.5]))
    x[4] = np.nan
    plan = plan_for(100, expected_batch_size=8, capacity=5)
    style = QuantileClipping(target_quantile=0.25, learning_rate=1.0)
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.0), plan, 1.0, clipping=style)
    model = linear_model()
    model.compile(optimizer=optimizer, loss=output)
    y = np.zeros(5, np.float32)
    # Padding stands before the others: behind them it would be cut off, but not for XLA.
    model.fit(marked_dataset(plan, x, y, present=[0, 1, 1, 1, 1]), verbose=0)
    unclipped = 0.5 + (2 - 4 / 2) / 8
    assert clip_norm_of(optimizer) == pytest.approx(np.exp(-(unclipped - 0.25)), rel=1e-6)


def moves(style: QuantileClipping, sigma: float, batch: float, statistic: float) -> np.ndarray:
    """log C after one move from 1, many times."""
    variable = keras.Variable(1.0, dtype="float64", trainable=False)
    moving = MovingClipNorm(style, variable, style.noise_multipliers(sigma)[1], batch)
    key = noise.NoiseKey()

    @tf.function
    def move() -> tf.Tensor:
        variable.assign(1.0)
        moving.move(moving.released(tf.constant(statistic, tf.float64), key.next_draw()))
        return tf.math.log(moving.value())

    return np.array([move().numpy() for _ in range(3000)])


@pytest.mark.cases(1)
@pytest.mark.parametrize("wrong", [1.0, 2 / 3, 3 / 2])
def test_the_count_has_its_noise(wrong: float) -> None:
    """Deviation ½·ratio·σ in units of examples, and companions that the test rejects."""
    style = QuantileClipping(target_quantile=0.5, learning_rate=1.0, noise_ratio=2.0)
    found = moves(style, sigma=1.5, batch=100.0, statistic=5.0)
    expected = -5.0 / 100
    deviation = 0.5 * 2.0 * 1.5 / 100
    pvalue = stats.kstest(found, stats.norm(expected, wrong * deviation).cdf).pvalue
    assert pvalue > 1e-5 if wrong == 1.0 else pvalue < 1e-9


@settings(max_examples=50, deadline=None)
@given(
    norms=st.lists(st.one_of(st.floats(0, 3), st.sampled_from([1.0, math.inf, math.nan]))),
    clip_norm=st.floats(0.5, 2),
)
def test_one_example_moves_the_statistic_by_half_at_most(
    norms: list[float], clip_norm: float
) -> None:
    style, squared = QuantileClipping(), np.array(norms, np.float32) ** 2
    present = np.ones(len(norms), np.float32)
    whole = float(style.statistic(squared, clip_norm, present))
    clearly = [
        0.5 if n < 0.9 * clip_norm else -0.5 for n in norms if not abs(n / clip_norm - 1) < 0.1
    ]
    if len(clearly) == len(norms):
        assert whole == pytest.approx(sum(clearly))
    for i in range(len(norms)):
        zeroed = present * (np.arange(len(norms)) != i)
        without = float(style.statistic(squared, clip_norm, zeroed))
        assert abs(whole - without) <= 0.5 + 1e-14 * len(norms)  # float64 rounds the sums
        shorter = float(style.statistic(np.delete(squared, i), clip_norm, np.delete(present, i)))
        assert shorter == pytest.approx(without)


def test_last_bits_of_norms_at_c_do_not_jump() -> None:
    """A count of norms <= C would move by 1,000 here."""
    style, one = QuantileClipping(), np.ones(1000, np.float32)
    below, above = (np.nextafter(one, np.float32(to)) for to in (0, 2))
    moved = [float(style.statistic(squared, 1.0, one)) for squared in (below, above)]
    assert abs(moved[0] - moved[1]) < 1e-2


def test_the_style_cannot_be_exchanged() -> None:
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan_for(8), 1.0, clipping=QuantileClipping())
    with pytest.raises(AttributeError, match="clipping"):
        optimizer.clipping = dp_sparse.FlatClipping()


def test_noise_of_the_gradients_follows_c() -> None:
    """The second step's noise has the scale of the C that the first one left."""
    plan = plan_for(100, steps=2, noise_multiplier=1.5)
    style = QuantileClipping(target_quantile=0.01, learning_rate=1.0, noise_ratio=1.5)
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(200, use_bias=False)])
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, 1.0, clipping=style)
    model.compile(optimizer=optimizer, loss=lambda y, prediction: 0.0 * prediction[:, 0])
    data = np.ones((100, 100), np.float32), np.ones(100, np.float32)
    model.fit(marked_dataset(plan, *data, steps=1), verbose=0)
    second = clip_norm_of(optimizer)
    assert second == pytest.approx(np.exp(-0.99), rel=0.1)
    before = np.array(model.trainable_variables[0])
    model.fit(marked_dataset(plan, *data, steps=1), verbose=0)
    moved = (np.array(model.trainable_variables[0]) - before).ravel() * 100
    deviation = second * optimizer.noise_multiplier
    assert stats.kstest(moved, stats.norm(0, deviation).cdf).pvalue > 1e-5
    assert stats.kstest(moved, stats.norm(0, 1.2 * deviation).cdf).pvalue < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_c_is_saved_and_goes_on(make: Any, tmp_path: pathlib.Path) -> None:
    x, y = clicks(40)
    model, plan = click_model(), plan_for(40, steps=4)
    style = QuantileClipping(learning_rate=1.0, noise_ratio=3.0)
    model.compile(optimizer=make("adagrad", plan, 5.0, clipping=style), loss="binary_crossentropy")
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
    left = clip_norm_of(model.optimizer)
    assert left != 5.0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert clip_norm_of(loaded.optimizer) == left
    assert loaded.optimizer.clipping == style
    assert loaded.optimizer.clip_norm == 5.0
    loaded.fit(plan.sampling.batches((x, y)), steps_per_epoch=1, verbose=0)
    assert clip_norm_of(loaded.optimizer) != left


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"target_quantile": 0.0}, "0 < target_quantile < 1"),
        ({"target_quantile": 1.0}, "0 < target_quantile < 1"),
        ({"learning_rate": 0.0}, "learning_rate > 0"),
        ({"noise_ratio": 1.0}, "noise_ratio > 1, got noise_ratio=1.0"),
        ({"noise_ratio": float("nan")}, "noise_ratio"),
    ],
)
def test_bad_arguments(bad: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantileClipping(**bad)


def test_c_stays_within_what_float32_can_noise() -> None:
    style = QuantileClipping(learning_rate=100.0)
    assert float(style.following(tf.constant(1.0, tf.float64), tf.constant(1e3, tf.float64))) > 0
    assert (
        float(style.following(tf.constant(1.0, tf.float64), tf.constant(-1e3, tf.float64))) < 1e13
    )
