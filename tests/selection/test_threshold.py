"""Survivors: their frequencies, their independence, and the lists that the optimizer works with."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dp_sparse import noise
from dp_sparse.accounting.mechanisms import default_threshold, survival_probability
from dp_sparse.core import xla
from dp_sparse.selection.contribution import ContributionMap
from dp_sparse.selection.threshold import Survivors, geometric_skips, select_rows
from tests.reference import adafest
from tests.reference.distributions import SIGNIFICANCE, binomial, chi_square, largest_correlation_z
from tests.selection.runs import rows_of_runs

GRAPH, XLA = WAYS = ("graph", "xla")
DIFFERENT = [
    case for case in adafest.SURVIVAL if case[0] * case[1] != 1
]  # where the misprint shows


def given_map(table_rows: list[int], values: dict[int, float]) -> ContributionMap:
    """A map with these values on these rows, numbered through; listed in the order of the dict."""
    offsets = np.concatenate([[0], np.cumsum(table_rows, dtype=np.int64)])
    rows = tf.constant(list(values), tf.int64)
    return ContributionMap(
        offsets, rows, tf.constant(list(values.values()), tf.float64), tf.zeros([0, 0]), []
    )


def new_draw() -> noise.Draw:
    return noise.NoiseKey().next_draw()


def selected(
    contributions: ContributionMap, threshold: float, deviation: float, runs: int, way: str = GRAPH
) -> np.ndarray:
    """Which rows survive in independent runs, int8 `[runs, c]`; in a graph or compiled by XLA."""

    def survived(rows: tf.Tensor) -> tf.Tensor:
        rows = tf.boolean_mask(rows, rows < contributions.num_rows)
        shape = tf.constant([contributions.num_rows], tf.int64)
        return tf.scatter_nd(rows[:, None], tf.ones_like(rows), shape)

    return rows_of_runs(
        lambda draw: select_rows(contributions, threshold, deviation, draw).row_ids,
        runs,
        way == XLA,
        survived,
    )


# ------------------------------------------------------------------------------------- frequencies


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("sigma", "clip_norm", "threshold", "value", "right", "_"), adafest.SURVIVAL
)
def test_survivors_have_the_right_frequency(
    sigma: float, clip_norm: float, threshold: float, value: float, right: float, _: float, way: str
) -> None:
    """Rows 0 to 399 looked up with V̂ = value, rows 400 to 799 with V̂ = 0, the rest by nobody."""
    looked_up, runs = 400, 60
    values = {row: value if row < looked_up else 0.0 for row in range(2 * looked_up)}
    found = selected(given_map([700, 1300], values), threshold, sigma * clip_norm, runs, way)
    true_rows, zero_rows, false_rows = np.split(found, [looked_up, 2 * looked_up], axis=1)
    zero = adafest.survival_probability(0.0, threshold, sigma, clip_norm)
    for rows, chance in [(true_rows, right), (zero_rows, zero), (false_rows, zero)]:
        per_run = rows.sum(axis=1, dtype=np.int64)
        assert chi_square(per_run, stats.binom(rows.shape[1], chance)) > SIGNIFICANCE
        assert binomial(rows.sum(dtype=np.int64), rows.size, chance) > SIGNIFICANCE


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sigma", "clip_norm", "threshold", "value", "_", "printed"), DIFFERENT)
def test_the_test_rejects_the_printed_formula(
    sigma: float,
    clip_norm: float,
    threshold: float,
    value: float,
    _: float,
    printed: float,
    way: str,
) -> None:
    looked_up, runs = 400, 60
    values = dict.fromkeys(range(looked_up), value)
    found = selected(given_map([700, 1300], values), threshold, sigma * clip_norm, runs, way)
    zero = adafest.printed_survival_probability(0.0, threshold, sigma, clip_norm)
    for rows, chance in [(found[:, :looked_up], printed), (found[:, looked_up:], zero)]:
        per_run = rows.sum(axis=1, dtype=np.int64)
        assert chi_square(per_run, stats.binom(rows.shape[1], chance)) < SIGNIFICANCE


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_jointly_independent(way: str) -> None:
    """c = 12, p0 = 0.2, rows 2 and 5 looked up: every pair, true or false, is uncorrelated."""
    deviation, runs = 2.0, 8_000
    threshold = deviation * stats.norm.isf(0.2)
    wanted = np.full(12, 0.2)
    wanted[[2, 5]] = [0.7, 0.05]
    values = {row: threshold - deviation * stats.norm.isf(wanted[row]) for row in (2, 5)}
    found = selected(given_map([4, 8], values), threshold, deviation, runs, way)
    for row in range(12):
        assert binomial(found[:, row].sum(dtype=np.int64), runs, wanted[row]) > SIGNIFICANCE
    assert (
        chi_square(found[:, [0, 1, 3, 4, *range(6, 12)]].sum(1), stats.binom(10, 0.2))
        > SIGNIFICANCE
    )
    limit = stats.norm.isf(SIGNIFICANCE / (12 * 11))
    assert largest_correlation_z(found) < limit
    coupled = found | np.roll(found, 1, axis=1) * (
        np.random.default_rng(0).random(found.shape) < 0.1
    )
    assert largest_correlation_z(coupled) > limit


@pytest.mark.slow
def test_runs_are_independent() -> None:
    found = selected(given_map([30], {3: 0.5}), 1.0, 1.0, 4000).astype(float)
    for row in (0, 3, 29):
        assert stats.pearsonr(found[:-1, row], found[1:, row]).pvalue > SIGNIFICANCE


# --------------------------------------------------------------------------------------- threshold


@pytest.mark.parametrize("sigma", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(("clip_norm", "threshold"), [(0.5, 4.0), (1.0, 1.0), (8.0, -3.0)])
def test_survival_probability(sigma: float, clip_norm: float, threshold: float) -> None:
    found = survival_probability(threshold, sigma * clip_norm)
    assert found == pytest.approx(
        adafest.survival_probability(0.0, threshold, sigma, clip_norm), rel=1e-12
    )


# c, σ1, p0, τ with Ψ(τ/σ1) = p0 (C1 = 1): from derivation.
@pytest.mark.parametrize(
    ("num_rows", "sigma", "probability", "threshold"),
    [
        (338_782, 0.8499423509862302, 1e-3, 2.626519311397871),
        (338_782, 3.0645107276692634, 1e-4, 11.396965916057773),
        (338_782, 6.039975248293655, 1e-6, 28.710565169927683),
        (50_265, 5.821550578668882, 1e-5, 24.82827746932101),
    ],
)
def test_default_threshold(
    num_rows: int, sigma: float, probability: float, threshold: float
) -> None:
    found = default_threshold(num_rows * probability, num_rows, sigma)
    assert found == pytest.approx(threshold, rel=1e-9)


@pytest.mark.parametrize("num_rows", [338_782, 10**7, 10**9])
def test_default_threshold_gives_the_expected_number_of_false_rows(num_rows: int) -> None:
    deviation = 2.94
    threshold = default_threshold(32, num_rows, deviation)
    assert num_rows * survival_probability(threshold, deviation) == pytest.approx(32, rel=1e-9)
    key, contributions = noise.NoiseKey(), given_map([num_rows], {7: 0.0})
    run = tf.function(
        lambda: tf.size(select_rows(contributions, threshold, deviation, key.next_draw()).row_ids)
    )
    counts = [int(run()) for _ in range(800)]
    assert chi_square(counts, stats.poisson(32)) > SIGNIFICANCE
    assert chi_square(counts, stats.poisson(37)) < SIGNIFICANCE


@pytest.mark.parametrize("num_rows", [1, 3, 64, 65])
def test_default_threshold_of_small_tables(num_rows: int) -> None:
    """At most half the rows are false: τ never falls below 0."""
    threshold = default_threshold(32, num_rows, 1.5)
    assert threshold >= 0
    assert survival_probability(threshold, 1.5) == pytest.approx(min(0.5, 32 / num_rows))


@pytest.mark.parametrize("threshold", [1e3, 1e30, 1e300])
def test_a_huge_threshold_lets_nothing_survive(threshold: float) -> None:
    found = select_rows(given_map([50], {3: 1.0, 40: 2.0}), threshold, 1.0, new_draw())
    assert found.row_ids.shape == [0]
    np.testing.assert_array_equal(found.places, [-1, -1])
    np.testing.assert_array_equal(found.starts, [0, 0])


@pytest.mark.parametrize("threshold", [-1e3, -1e30, -1e300])
def test_a_very_negative_threshold_lets_everything_survive(threshold: float) -> None:
    found = select_rows(given_map([20, 30], {40: 1.0, 3: 2.0}), threshold, 1.0, new_draw())
    np.testing.assert_array_equal(found.row_ids, np.arange(50))
    np.testing.assert_array_equal(found.places, [40, 3])
    np.testing.assert_array_equal(found.starts, [0, 20, 50])


# -------------------------------------------------------------------------------------- bookkeeping


def brute_force(
    contributions: ContributionMap, threshold: float, deviation: float, draw: noise.Draw
) -> Survivors:
    """The same draw with Python sets: skips on rows that were looked up are discarded."""
    rows, values = contributions.row_ids.numpy().tolist(), contributions.values.numpy()
    normals = noise.normal(draw, noise.Purpose.CONTRIBUTION, len(rows)).numpy()
    survived = {
        row
        for row, value, normal in zip(rows, values, normals, strict=True)
        if value + deviation * normal >= threshold
    }
    chance = stats.norm.sf(threshold / deviation)
    hits = set(geometric_skips(draw, contributions.num_rows, float(chance)).numpy().tolist())
    row_ids = sorted(survived | (hits - set(rows)))
    places = [row_ids.index(row) if row in survived else -1 for row in rows]
    starts = [sum(row < offset for row in row_ids) for offset in contributions.offsets]
    return Survivors(np.array(row_ids), np.array(places), np.array(starts))


CASES = given(
    table_rows=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    looked_up=st.floats(0, 1),
    chance=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**32),
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@CASES
def test_bookkeeping_by_xla(
    table_rows: list[int], looked_up: float, chance: float, seed: int
) -> None:
    """Rows come sorted there, and what is filled up is c."""
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(sum(table_rows)) < looked_up)
    contributions = given_map(table_rows, {int(row): float(rng.integers(0, 3)) for row in rows})
    threshold, draw = float(0.7 * stats.norm.isf(chance)), new_draw()

    @tf.function
    def compiled() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        def body() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            found = select_rows(contributions, threshold, 0.7, draw)
            return found.row_ids, found.places, found.starts

        return xla.compiled(body)

    row_ids, places, starts = compiled()
    expected = brute_force(contributions, threshold, 0.7, draw)
    np.testing.assert_array_equal(row_ids[: len(expected.row_ids)], expected.row_ids)
    assert np.all(row_ids[len(expected.row_ids) :] == contributions.num_rows)
    np.testing.assert_array_equal(places, expected.places)
    np.testing.assert_array_equal(starts, expected.starts)


@settings(max_examples=150, deadline=None)
@CASES
def test_bookkeeping(table_rows: list[int], looked_up: float, chance: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.flatnonzero(rng.random(sum(table_rows)) < looked_up))
    contributions = given_map(table_rows, {int(row): float(rng.integers(0, 3)) for row in rows})
    threshold, draw = float(0.7 * stats.norm.isf(chance)), new_draw()
    found = select_rows(contributions, threshold, 0.7, draw)
    expected = brute_force(contributions, threshold, 0.7, draw)
    assert found.row_ids.dtype == tf.int64 and found.places.dtype == tf.int32
    np.testing.assert_array_equal(found.row_ids, expected.row_ids)
    np.testing.assert_array_equal(found.places, expected.places)
    np.testing.assert_array_equal(found.starts, expected.starts)


@pytest.mark.slow
def test_empty_batch_still_has_false_rows() -> None:
    contributions = given_map([600, 400], {})
    counts = []
    for _ in range(400):
        found = select_rows(contributions, 1.0, 0.5, new_draw())
        assert found.places.shape == [0]
        starts = found.starts.numpy()
        assert starts[0] == 0 and starts[2] == found.row_ids.shape[0]
        counts.append(starts[2])
    assert chi_square(counts, stats.binom(1000, stats.norm.sf(2.0))) > SIGNIFICANCE


def test_rows_of_huge_tables() -> None:
    sizes = [3_000_000_000, 7_000_000_000]
    contributions = given_map(sizes, {2_999_999_999: 50.0, 9_999_999_999: 50.0, 3_000_000_000: -50})
    found = select_rows(contributions, default_threshold(40, sum(sizes), 1.0), 1.0, new_draw())
    rows, starts = found.row_ids.numpy(), found.starts.numpy()
    assert np.all(np.diff(rows) > 0) and rows[-1] == 9_999_999_999
    assert rows[starts[1] - 1] == 2_999_999_999
    assert rows[starts[1]] > 3_000_000_000
    np.testing.assert_array_equal(found.places, [starts[1] - 1, len(rows) - 1, -1])


def test_graph_and_eager_agree() -> None:
    draw = new_draw()

    signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float64)]

    @tf.function(input_signature=signature)
    def traced(rows: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        contributions = ContributionMap(np.array([0, 40, 90]), rows, values, tf.zeros([0, 0]), [])
        found = select_rows(contributions, 0.4, 0.6, draw)
        return found.row_ids, found.places, found.starts

    for values in ({}, {5: 1.0}, {80: 0.0, 5: 1.0, 41: 0.3}):
        contributions = given_map([40, 50], values)
        eager = select_rows(contributions, 0.4, 0.6, draw)
        graph = traced(contributions.row_ids, contributions.values)
        for left, right in zip(graph, (eager.row_ids, eager.places, eager.starts), strict=True):
            np.testing.assert_array_equal(left, right)
