"""What a step does beside noise: who votes for rows, how rows are picked, what slots are fed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.distribution.embedding_layers import host_step, rounding_grid
from dp_sparse.optimizers import exponential, row_updates
from dp_sparse.step import forward_backward, train_step
from tests.optimizers.observed_steps import RATE, ROWS, SIZE, WIDTH, Run, cases, data, run
from tests.replicas import strategy_of
from tests.training_cases import marked_dataset, plan_for

START = 0.2  # of Adagrad's accumulators: as large as the squares that noise adds

# ----------------------------------------------------------------------------------------- slots

Slots = dict[str, Callable[[np.ndarray], np.ndarray]]  # what a noisy gradient makes of each

WRAPPED: dict[str, tuple[Callable[[], Any], Slots]] = {
    "momentum": (
        lambda: keras.optimizers.SGD(RATE, momentum=0.9),
        {"momentum": lambda g: -RATE * g},
    ),
    "adagrad": (
        lambda: keras.optimizers.Adagrad(RATE, initial_accumulator_value=START),
        {"accumulator": lambda g: START + g**2},
    ),
    "adam": (
        lambda: keras.optimizers.Adam(RATE),
        {"momentum": lambda g: 0.1 * g, "velocity": lambda g: 0.001 * g**2},
    ),
}


@functools.cache
def noisy_gradients(method: str, way: str) -> list[np.ndarray]:
    """Of the first step: the same key and weights as with every other wrapped optimizer."""
    return run(method, way).gradients(0)


def wrong_slots(found: Run, gradients: list[np.ndarray], expected: Slots) -> list[str]:
    """Slots that are not what the gradients make of them; where there is none, a row kept its."""
    wrong = []
    for name, gradient in zip(found.names, gradients, strict=True):
        touched = gradient != 0 if gradient.ndim < 2 else np.any(gradient != 0, axis=1)
        for slot, of in expected.items():
            values = found.slots[f"{name}_{slot}"]
            close = np.isclose(values[touched], of(gradient)[touched], rtol=1e-3, atol=1e-6)
            start = of(np.zeros_like(gradient))[~touched]
            if not close.all() or not np.allclose(values[~touched], start):
                wrong.append(f"{name}_{slot}")
    return wrong


SLOTS = [
    ("dpsgd", "graph", "momentum"),
    ("dpsgd", "graph", "adagrad"),
    ("dpsgd", "graph", "adam"),
    ("fest", "graph", "adagrad"),
    ("fest", "graph", "adam"),
    *(
        pytest.param(method, way, name, marks=pytest.mark.slow)
        for method, way in [
            ("adafest", "graph"),
            ("adafest_plus", "graph"),
            ("exponential", "graph"),
            ("adafest", "xla"),
            ("adafest", "microbatches"),
            ("adafest", "mirrored"),
            ("exponential", "mirrored"),
        ]
        for name in ("adagrad", "adam")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "way", "name"), SLOTS)
def test_slots_hold_the_noisy_gradient(method: str, way: str, name: str) -> None:
    make, expected = WRAPPED[name]
    found = run(method, way, wrapped=make)
    assert wrong_slots(found, noisy_gradients(method, way), expected) == []


def accumulator_off(found: Run) -> float:
    """How far from Δ = η·g/√a and a = a₀ + g² the tables are, as a share of a₀."""
    off = []
    for index in range(2):
        a = found.slots[f"{found.names[index]}_accumulator"].astype(np.float64)
        update = (found.weights[0][index].astype(np.float64) - found.weights[1][index]) / RATE
        off.append(np.max(np.abs(a * (1 - update**2) - START)) / START)
        assert np.mean(np.abs(update) > 0.3) > 0.2  # so that the squares are seen
    return max(off)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["graph", "train_tables"])
def test_adagrad_takes_what_it_applies(way: str) -> None:
    """By the weights of this very run, since each pass over `train_tables` draws a key."""
    assert accumulator_off(run("adafest", way, wrapped=WRAPPED["adagrad"][0])) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("way", ["graph", "train_tables"])
def test_accumulators_fed_without_noise_are_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(table: Any, accumulator: Any, gradient: Any, rate: Any, epsilon: float) -> None:
        total = accumulator.sparse_read(gradient.indices) + 1e-6
        accumulator.scatter_update(tf.IndexedSlices(total, gradient.indices))
        step = rate * gradient.values * tf.math.rsqrt(total + epsilon)
        table.scatter_sub(tf.IndexedSlices(step, gradient.indices))

    monkeypatch.setattr(row_updates, "adagrad_rows", without)
    monkeypatch.setattr(rounding_grid, "adagrad_rows", without)
    found = run("adafest", way, wrapped=WRAPPED["adagrad"][0])
    assert accumulator_off(found) > 0.1


# --------------------------------------------------------------------------------------- weight 0


def rows_of_weight_0(method: str, way: str) -> tuple[set[int], set[int]]:
    """Rows that a step moved: of examples of weight 1, and of those of weight 0.

    With hardly any noise, rows with one vote are over the threshold.
    """
    ids, y = data()
    counted = np.arange(SIZE) % 2 == 0
    ids = np.where(counted[:, np.newaxis], ids % 2000, 2000 + ids % 2000).astype(np.int32)
    found = run(
        method,
        way,
        sigma=1e-3,
        threshold=0.5,
        batches=[(ids, y)],
        sample_weight=counted.astype(np.float32),
    )
    moved = [set(np.flatnonzero(np.any(g != 0, axis=1))) for g in found.gradients(0)[:2]]
    looked_up = [set(ids[counted, index]) for index in range(2)]
    allowed = {row for row in range(ROWS) if method == "adafest" or row % 4}
    assert all(
        m & set(range(2000)) == own & allowed for m, own in zip(moved, looked_up, strict=True)
    )
    return moved[0] | moved[1], {row for rows in moved for row in rows if row >= 2000}


@pytest.mark.parametrize(("method", "way"), cases("adafest", "adafest_plus"))
def test_examples_of_weight_0_have_no_vote(method: str, way: str) -> None:
    moved, of_weight_0 = rows_of_weight_0(method, way)
    assert len(moved) > 500 and not of_weight_0


VOTES = [
    ("adafest", "graph"),
    *(
        pytest.param("adafest", way, marks=pytest.mark.slow)
        for way in ("xla", "microbatches", "mirrored", "train_tables")
    ),
    pytest.param("adafest_plus", "graph", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "way"), VOTES)
def test_votes_of_weight_0_are_noticed(
    method: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forward_backward, train_step, host_step):
        monkeypatch.setattr(module, "real_examples", lambda examples: examples.present)
    assert len(rows_of_weight_0(method, way)[1]) > 500


# -------------------------------------------------------------------------- exponential selection

PICKED, VOTED, ROW_CLIP = 1000, 1500, 2.0
EPSILON = 1.2  # of one pick


def picked(way: str) -> int:
    """How many of the 1,500 rows of score C3 are among 1,000 picked of 4,000."""
    mechanism = dp_sparse.ExponentialSelection(PICKED)
    plan = plan_for(VOTED, steps=1, noise_multiplier=1 / (np.sqrt(PICKED) * EPSILON))
    plan = dataclasses.replace(plan, mechanism=mechanism)
    strategy = strategy_of(2) if way == "mirrored" else tf.distribute.get_strategy()
    with strategy.scope():
        ids = keras.Input((1,), dtype="int32")
        rows = keras.layers.Flatten()(keras.layers.Embedding(ROWS, WIDTH, "zeros")(ids))
        model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="ones")(rows))
        optimizer = dp_sparse.ExponentialSelectionOptimizer(
            keras.optimizers.SGD(1.0), plan, 0.5, row_clip_norm=ROW_CLIP
        )
        optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
        model.compile(optimizer, "mse", jit_compile=way == "xla")
    x = np.arange(VOTED, dtype=np.int32)[:, np.newaxis]
    batches = marked_dataset(plan, x, np.full((VOTED, 1), 100.0, np.float32))
    model.fit(batches, verbose=0)
    moved = np.flatnonzero(np.any(model.get_weights()[0] != 0, axis=1))
    assert len(moved) == PICKED
    return int(np.sum(moved < VOTED))


@functools.cache
def expected_picks(factor: float = 1.0) -> tuple[float, float]:
    """Mean and deviation of that number, by Gumbel noise of `factor`·C3/ε0 on every score."""
    rng, counts = np.random.default_rng(0), []
    for _ in range(400):
        scores = ROW_CLIP * (np.arange(ROWS) < VOTED)
        noisy = scores + rng.gumbel(scale=factor * ROW_CLIP / EPSILON, size=ROWS)
        counts.append(np.sum(np.argsort(-noisy)[:PICKED] < VOTED))
    return float(np.mean(counts)), float(np.std(counts))


WAYS = ["graph", *(pytest.param(way, marks=pytest.mark.slow) for way in ("xla", "mirrored"))]


@pytest.mark.parametrize("way", WAYS)
def test_picks_are_as_random_as_they_are_paid_for(way: str) -> None:
    mean, deviation = expected_picks()
    assert abs(picked(way) - mean) < 5 * deviation
    for wrong in (0.5, 0.9, 1.1, 2.0):
        assert abs(expected_picks(wrong)[0] - mean) > 1.5 * deviation
    assert abs(expected_picks(0.5)[0] - mean) > 10 * deviation


@pytest.mark.parametrize("way", WAYS)
def test_noise_for_half_the_sensitivity_is_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = exponential.select_top_rows

    def halved(scores: Any, count: int, scale: float, draw: Any) -> Any:
        return select(scores, count, scale / 2, draw)

    monkeypatch.setattr(exponential, "select_top_rows", halved)
    mean, deviation = expected_picks()
    assert abs(picked(way) - mean) > 5 * deviation
