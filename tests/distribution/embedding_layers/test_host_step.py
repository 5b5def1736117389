"""The host's part of a step: ids, gains, the layout of a choice, and the distribution of noise."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dp_sparse import distribution, noise
from dp_sparse.core.errors import BadExampleError, PrivacyError, translated
from dp_sparse.distribution.embedding_layers import host_step
from dp_sparse.distribution.embedding_layers.private_tables import Feature, Table
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import Strategy
from tests.reference.distributions import SIGNIFICANCE


@given(st.sampled_from(["sum", "mean", "sqrtn"]), st.lists(st.integers(0, 4), min_size=1))
@settings(max_examples=60, deadline=None)
def test_gains_as_the_combiner_gives_them(combiner: str, given_weights: list[int]) -> None:
    weights = np.array(given_weights, np.float64)
    squares = np.sqrt(np.sum(weights**2))
    divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": squares}[combiner]
    expected = weights / divisor if divisor else np.zeros(len(weights))
    gains = host_step._gains(combiner, tf.constant(weights[None], tf.float32))
    np.testing.assert_allclose(gains[0], expected, rtol=1e-6)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_gains_of_huge_weights_are_finite(combiner: str) -> None:
    gains = host_step._gains(combiner, tf.fill([1, 4], 3e38)).numpy()
    np.testing.assert_allclose(gains, 0.25 if combiner == "mean" else 0.5)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_first_lookup_of_a_row(rows: int, lookups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, valid = rng.integers(0, 3, (rows, lookups)), rng.random((rows, lookups)) < 0.7
    expected = [
        [
            next(j for j in range(lookups) if valid[i, j] and ids[i, j] == ids[i, k])
            if valid[i, k]
            else k
            for k in range(lookups)
        ]
        for i in range(rows)
    ]
    found = host_step._first_of_example(tf.constant(ids), tf.constant(valid))
    np.testing.assert_array_equal(found, expected)


def choice_of(tables: distribution.PrivateTables, table: Table, rows: np.ndarray) -> Any:
    values = tf.cast(rows[:, None] * np.ones(table.width), tf.float32)
    return host_step.HostStep(tables)._spread(table, tf.constant(rows), values)


@pytest.mark.parametrize("count", [0, 1, 7, 40])
def test_rows_are_spread_over_replicas(count: int) -> None:
    """Each replica has the same number of places, and as many rows as the others, but for one."""
    tables = two_tables.private_tables(two_tables.private_optimizer(), strategy=Strategy())
    table = tables.tables[0]
    rows = np.sort(np.random.default_rng(count).permutation(40)[:count]).astype(np.int64)
    sent = choice_of(tables, table, rows)
    ids, values = sent["features"][table.noise], sent["noise"][table.path].numpy()
    assert ids.shape[0] == table.capacity == len(values)
    found = {}
    for place, own in enumerate(ids.to_list()):
        assert len(own) <= 1
        assert (values[place] == (own[0] if own else 0)).all()  # noise goes with its row
        found.update(dict.fromkeys(own, place))
    assert sorted(found) == list(rows)
    of_replica = np.bincount([place // 16 for place in found.values()], minlength=4)
    assert of_replica.max() - of_replica.min() <= 1


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    tables = two_tables.private_tables(two_tables.private_optimizer())
    table = dataclasses.replace(tables.tables[0], capacity=8)
    assert choice_of(tables, table, np.arange(8))["features"][table.noise].shape[0] == 8
    with pytest.raises(PrivacyError, match="More rows of shared .* than the 8"), translated():
        choice_of(tables, table, np.arange(9))


def one(**changed: Any) -> tuple[Feature, Table]:
    feature = Feature(
        **{"name": "f", "most_ids": 3, "bag": True, "combiner": "sum", "weights": None, **changed}
    )
    return feature, Table("t", 10, 2, (feature,), 16)


@pytest.mark.parametrize(
    ("changed", "x", "message"),
    [
        ({}, {"f": [[10, 0, 0]]}, "Expected ids .* in feature 'f', got 10"),
        ({}, {"f": [[-2, 0, 0]]}, "in feature 'f', got -2"),
        ({"bag": False, "most_ids": 1}, {"f": [-1]}, "in feature 'f', got -1"),
        ({"weights": "w"}, {"f": [[1, 0, 0]], "w": [[1.0, -1.0, 0.0]]}, "weights .* got -1"),
        ({"weights": "w"}, {"f": [[1, 0, 0]], "w": [[np.nan, 1.0, 0.0]]}, "weights .* got nan"),
        ({"weights": "w"}, {"f": [[1, 0, 0]], "w": [[1e20, 1.0, 0.0]]}, "weights .* got 1e"),
    ],
)
def test_bad_ids_and_weights(changed: Any, x: Any, message: str) -> None:
    with pytest.raises(BadExampleError, match=message), translated():
        host_step.read_ids(*(one(**changed)[0], tf.nest.map_structure(tf.constant, x), one()[1]))


@pytest.mark.parametrize(
    ("changed", "x", "message"),
    [
        ({}, {}, "Expected 'f' among the inputs, in a dictionary, got"),
        ({}, {"f": [1, 2]}, r"Expected ids of 'f' of shape \[batch, 3\], got \(2,\)"),
        ({"bag": False, "most_ids": 1}, {"f": [[1, 2]]}, r"shape \[batch\] or \[batch, 1\]"),
        ({"weights": "w"}, {"f": [[1, 0, 0]] * 2, "w": [1.0, 7.0]}, "weights .* of the shape"),
        ({}, {"f": [[1.5, 0.0, 0.0]]}, "Expected integer ids of 'f', got float32"),
        ({}, {"f": [["a", "b", "c"]]}, "Expected integer ids of 'f', got string"),
        ({"weights": "w"}, {"f": [[1, 0, 0]], "w": [["a"] * 3]}, "numbers as weights .* string"),
    ],
)
def test_inputs_that_do_not_fit(changed: Any, x: Any, message: str) -> None:
    x = {name: tf.constant(value) for name, value in x.items()}
    with pytest.raises(ValueError, match=message):
        host_step.read_ids(one(**changed)[0], x, one()[1])


def noise_of_steps(sigma: float) -> tuple[np.ndarray, float]:
    """All noise of a hundred batches, and the deviation that the optimizer's numbers give it."""
    optimizer = two_tables.private_optimizer(noise_multiplier=sigma, expected_false_rows=30)
    tables = two_tables.private_tables(optimizer)
    batches = optimizer.plan.sampling.batches(two_tables.data()).take(100)
    values = []
    for batch in batches.map(host_step.HostStep(tables)):
        for table in tables.tables:
            there = np.diff(batch["features"][table.noise].row_splits.numpy()) > 0
            own = batch["noise"][table.path].numpy()
            assert not own[~there].any()
            values.append(own[there])
    deviation = two_tables.CLIP * optimizer.gradient_noise_multiplier / two_tables.SIZE
    return np.concatenate(values), deviation


def test_noise_of_rows_has_its_distribution() -> None:
    values, deviation = noise_of_steps(1.0)
    assert len(values) > 1000 and len(np.unique(values, axis=0)) == len(values)
    values = values.ravel()
    assert stats.kstest(values, "norm", (0, deviation)).pvalue > SIGNIFICANCE
    for wrong in (0.8, 1.2):  # a test that cannot fail would be none
        assert stats.kstest(values, "norm", (0, wrong * deviation)).pvalue < SIGNIFICANCE


def test_passes_differ() -> None:
    """Each pass has a key of its own, and each batch its own draw."""
    optimizer = two_tables.private_optimizer(noise_multiplier=1.0)
    tables, seen = two_tables.private_tables(optimizer), []
    for _ in range(2):
        batches = optimizer.plan.sampling.batches(two_tables.data()).take(3)
        seen += [b["noise"]["shared"].numpy() for b in batches.map(host_step.HostStep(tables))]
    values = np.concatenate([own[own.any(1)] for own in seen])
    assert len(np.unique(values, axis=0)) == len(values) > 10


def test_padding_chooses_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples of weight 0 and rows of padding add nothing to a map without noise."""
    monkeypatch.setattr(noise, "normal", lambda draw, purpose, count: tf.zeros([count], tf.float64))
    optimizer = two_tables.private_optimizer(threshold=1e-3)
    tables, (x, y) = two_tables.private_tables(optimizer), two_tables.data()
    weights = np.r_[1.0, np.zeros(two_tables.SIZE - 1)].astype("float32")
    batch = next(
        iter(optimizer.plan.sampling.batches((x, y, weights)).map(host_step.HostStep(tables)))
    )
    (first,) = np.flatnonzero(batch["examples"].sample_weight.numpy())
    for name, keep in batch["keep"].items():
        assert not np.delete(keep.numpy(), first, 0).any()
        assert keep.numpy()[first].any() or name == "words"
    assert batch["features"]["left"].shape == (tables.examples,)
