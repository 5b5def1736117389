"""Forecasts against batches drawn and selected for real; thresholds that follow from them."""

import dataclasses
import time

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import dp_sparse
from dp_sparse import noise
from dp_sparse.accounting.forecast import forecast
from dp_sparse.accounting.mechanisms import FALSE_ROWS, split_noise
from dp_sparse.selection.contribution import TableLookups, contribution_map
from dp_sparse.selection.threshold import select_rows
from tests.training_cases import plan_for

RATIO, CLIP_NORM, SIGMA = 2.0, 1.0, 0.4


def zipf(rows: int, power: float = 1.1) -> np.ndarray:
    weights = 1 / np.arange(1, rows + 1) ** power
    return weights / weights.sum()


def simulated(
    frequencies: list[np.ndarray], batch: int, threshold: float, runs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean rows of each table that are looked up, survive among those, and are false."""
    rng, key = np.random.default_rng(0), noise.NoiseKey()
    deviation = split_noise(SIGMA, RATIO)[0] * CLIP_NORM
    counts = np.zeros((3, len(frequencies)))

    @tf.function(reduce_retracing=True)
    def select(*ids: tf.Tensor) -> tf.Tensor:
        tables = [
            TableLookups(len(f), i[:, None], tf.ones_like(i[:, None], tf.bool))
            for f, i in zip(frequencies, ids, strict=True)
        ]
        contributions = contribution_map(tables, CLIP_NORM)
        return select_rows(contributions, threshold, deviation, key.next_draw()).row_ids

    starts = np.concatenate([[0], np.cumsum([len(f) for f in frequencies])])
    for _ in range(runs):
        size = rng.poisson(batch)
        ids = [rng.choice(len(f), size, p=f) for f in frequencies]
        rows = select(*map(tf.constant, ids)).numpy()
        for t, own in enumerate(ids):
            survivors = rows[(rows >= starts[t]) & (rows < starts[t + 1])] - starts[t]
            true = np.isin(survivors, own).sum()
            counts[:, t] += [len(np.unique(own)), true, len(survivors) - true]
    return tuple(counts / runs)


@pytest.mark.cases(1)
@pytest.mark.parametrize("threshold", [0.6, 1.5, 6.0])
def test_forecast_rows_are_those_of_real_batches(threshold: float) -> None:
    """With half the noise, or twice the batch, they are not."""
    frequencies, runs = [zipf(400), zipf(3_000, 0.8)], 200
    tables = {"a": frequencies[0], "b": frequencies[1]}
    settings = {"noise_ratio": RATIO, "contribution_clip_norm": CLIP_NORM, "threshold": threshold}
    found = simulated(frequencies, 300, threshold, runs)

    def worst(sigma: float, batch: float) -> float:
        """In standard errors of a mean of Poisson counts, which these are at most."""
        expected = forecast(sigma, batch, tables, **settings).tables.values()
        wanted = [[t.looked_up, t.survivors, t.false_rows] for t in expected]
        errors = np.sqrt(np.maximum(np.array(wanted).T, 0.05) / runs)
        return float(np.abs((np.array(found) - np.array(wanted).T) / errors).max())

    assert worst(SIGMA, 300) < 5
    assert worst(SIGMA, 600) > 20
    if threshold < 6:  # so high that noise hardly matters
        assert worst(SIGMA / 2, 300) > 20


def test_ways_to_choose_a_threshold() -> None:
    tables = {"a": zipf(1_000), "b": zipf(50_000)}
    sizes = {name: len(f) for name, f in tables.items()}
    by_default = forecast(1.0, 500, sizes)
    unseen = [1 - t.looked_up / t.rows for t in by_default.tables.values()]
    false = [t.false_rows for t in by_default.tables.values()]
    shares = [FALSE_ROWS / 51 * unseen[0], FALSE_ROWS * 50 / 51 * unseen[1]]
    assert false == pytest.approx(shares)
    assert by_default.row_reduction == pytest.approx(51_000 / by_default.rows_per_step)
    rate = forecast(1.0, 500, sizes, false_positive_rate=1e-3)
    false = [t.false_rows for t in rate.tables.values()]
    assert false == pytest.approx([1 * unseen[0], 50 * unseen[1]])
    for wanted in (20.0, 400.0, 5_000.0):
        found = forecast(1.0, 500, tables, rows_per_step=wanted)
        assert found.rows_per_step == pytest.approx(wanted, rel=1e-6)
        again = forecast(1.0, 500, tables, threshold=found.threshold)
        assert again == found


def test_what_a_plan_explains() -> None:
    plan = plan_for(1_000, expected_batch_size=100, noise_multiplier=2.0)
    found = plan.explain({"ads": 1_000, "users": zipf(200)}, noise_ratio=5.0)
    assert found.contribution_noise_multiplier == pytest.approx(2 * np.sqrt(26))
    assert found.gradient_noise_multiplier == pytest.approx(2 * np.sqrt(1.04))
    lines = str(found).splitlines()
    assert "sigma1 = 10.2" in lines[0] and "sigma2 = 2.04" in lines[0]
    assert "threshold" in lines[1] and "2 rows" in lines[1]
    assert lines[-3].split()[:2] == ["ads*", "1,000"] and lines[-2].startswith("users ")
    assert lines[-1].startswith("* assumed: rows are looked up by Zipf's law, exponent 1.1")
    known = plan.explain({"users": zipf(200)})
    assert "assumed" not in str(known)


@pytest.mark.parametrize("rows", [1, 7, 10_000, 10_001, 300_000])
def test_without_frequencies_they_follow_from_zipfs_law(rows: int) -> None:
    found = forecast(0.8, 500, {"a": rows}, threshold=2.0).tables["a"]
    wanted = forecast(0.8, 500, {"a": zipf(rows)}, threshold=2.0).tables["a"]
    assert found.assumed and not wanted.assumed and found.rows == wanted.rows == rows
    for name in ("looked_up", "survivors", "false_rows", "trained_share"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=2e-3, abs=1e-6)


def test_a_table_of_a_billion_rows_takes_no_longer() -> None:
    begun = time.perf_counter()
    found = forecast(0.8, 2048, {"a": 10**9}, rows_per_step=100).tables["a"]
    assert time.perf_counter() - begun < 10
    assert found.rows == pytest.approx(10**9, abs=1) and found.noised == pytest.approx(100)


def test_more_lookups_of_an_example_are_shared_by_the_tables() -> None:
    one = forecast(0.8, 500, {"a": 500, "b": 500}, threshold=1.0)
    four = forecast(0.8, 500, {"a": 500, "b": 500}, threshold=1.0, lookups=4)
    assert one.tables["a"].looked_up < four.tables["a"].looked_up == four.tables["b"].looked_up


@pytest.mark.parametrize("threshold", [0.6, 1.5, 6.0])
def test_the_share_of_lookups_that_train(threshold: float) -> None:
    """Against batches drawn with NumPy alone."""
    frequencies, batch, sigma = zipf(400), 300, split_noise(SIGMA, RATIO)[0]
    rng, trained, lookups = np.random.default_rng(1), 0, 0
    for _ in range(400):
        counts = np.bincount(rng.choice(400, rng.poisson(batch), p=frequencies), minlength=400)
        survive = counts * CLIP_NORM + sigma * rng.standard_normal(400) >= threshold
        trained, lookups = trained + counts[survive].sum(), lookups + counts.sum()
    settings = {"noise_ratio": RATIO, "threshold": threshold}
    found = forecast(SIGMA, batch, {"a": frequencies}, **settings).tables["a"].trained_share
    assert found == pytest.approx(trained / lookups, abs=0.005)
    other = forecast(10 * SIGMA, batch, {"a": frequencies}, **settings).tables["a"].trained_share
    if threshold < 6:
        assert abs(other - trained / lookups) > 0.02


def test_a_plan_of_another_mechanism_explains_nothing() -> None:
    plan = dataclasses.replace(plan_for(100), mechanism=dp_sparse.ExponentialSelection(3))
    with pytest.raises(ValueError, match=r"GaussianMechanism\(\), which DPAdaFESTOptimizer needs"):
        plan.explain({"ads": 1_000})


@pytest.mark.parametrize(
    ("tables", "settings", "message"),
    [
        ({}, {}, "got none"),
        ([9], {}, r"got tables=\[9\]"),
        ({"a": 0}, {}, r"tables\['a'\]=0"),
        ({"a": [0.5, 1.5]}, {}, r"tables\['a'\] to be a number of rows, or"),
        ({"a": [[0.5]]}, {}, r"tables\['a'\]"),
        ({"a": [float("nan")]}, {}, r"tables\['a'\]"),
        ({"a": 9}, {"threshold": 1.0, "rows_per_step": 3}, "one way to choose the threshold"),
        ({"a": 9}, {"rows_per_step": 9}, "rows_per_step < 9"),
        ({"a": 9}, {"rows_per_step": -1}, "rows_per_step"),
        ({"a": 9}, {"false_positive_rate": 2.0}, "false_positive_rate"),
        ({"a": 9}, {"false_positive_rate": 0.6}, "false_positive_rate <= 0.5"),
        ({"a": 9}, {"expected_false_rows": 5}, "expected_false_rows <= 4.5"),
        ({"a": [0.9, 0.9]}, {}, "add up to lookups=1 at most, got 1.8"),
        ({"a": 9}, {"lookups": 0}, "lookups=0"),
        ({"a": 9}, {"noise_ratio": 0}, "noise_ratio=0"),
        ({"a": 9}, {"threshold": float("inf")}, "threshold=inf"),
    ],
)
def test_bad_arguments(tables: dict, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_for(100).explain(tables, **settings)


def test_lookups_of_an_example_may_be_given_for_each_table() -> None:
    """A table of three lookups is looked up three times as often, and they are counted for C1."""
    plan = plan_for(1_000, expected_batch_size=100, noise_multiplier=2.0)
    one, three = (plan.explain({"a": 500, "b": (500, own)}) for own in (1, 3))
    assert (one.lookups, three.lookups) == (2, 4)
    assert three.tables["b"].looked_up > 1.5 * one.tables["b"].looked_up
    assert three.tables["a"].looked_up == pytest.approx(one.tables["a"].looked_up)
    assert three.tables["b"].assumed
    none = plan.explain({"a": 500, "b": (500, 0)}).tables["b"]
    assert none.looked_up == none.survivors == none.trained_share == 0 < none.false_rows
    for wrong in ((500, -1), (500, "3"), (500, 0.5), (0.3, 1.5)):
        with pytest.raises(ValueError, match=r"tables\['b'\]"):
            plan.explain({"a": 500, "b": wrong})
    assert plan.explain({"b": (0.3, 0.5)}).tables["b"].rows == 2  # two probabilities


@pytest.mark.parametrize(("window", "steps_per_round", "rounds"), [(8, 1, 8), (8, 100, 1)])
def test_forecasts_of_a_window_are_those_of_counts(
    window: int, steps_per_round: int, rounds: int
) -> None:
    """Each row is looked up as often as Poisson says, and survives the noise of so many maps."""
    own, batch, runs, threshold = zipf(2_000), 100, 400, 1.2
    rng, deviation = np.random.default_rng(0), split_noise(SIGMA, RATIO)[0]
    counts = rng.poisson(window * batch * own, (runs, len(own)))
    noisy = counts + np.sqrt(rounds) * deviation * rng.standard_normal(counts.shape)
    survived = noisy >= np.sqrt(rounds) * threshold
    settings = {"noise_ratio": RATIO, "threshold": threshold, "window": window}
    found = forecast(SIGMA, batch, {"a": own}, steps_per_round=steps_per_round, **settings)
    (table,) = found.tables.values()
    looked_up = counts > 0
    for expected, samples in (
        (table.looked_up, looked_up),
        (table.survivors, survived & looked_up),
        (table.false_rows, survived & ~looked_up),
    ):
        assert samples.sum(axis=1).mean() == pytest.approx(expected, rel=0.01, abs=0.5)
    assert (survived @ own).mean() == pytest.approx(table.trained_share, rel=0.01)
    assert found.trained_share == pytest.approx(table.trained_share)
    chance = stats.norm.sf(threshold / deviation)
    assert found.expected_false_rows == pytest.approx(len(own) * chance)


def test_a_window_follows_from_the_rows_that_get_noise() -> None:
    plan = plan_for(50_000, expected_batch_size=500, steps=200, noise_multiplier=1.0)
    tables = {"a": (20_000, 8)}
    found = plan.explain(tables, noised_rows=300)
    assert found.window > 1
    assert found.rows_per_step == pytest.approx(300)
    again = plan.explain(tables, window=found.window, expected_false_rows=found.expected_false_rows)
    assert again.trained_share == pytest.approx(found.trained_share)
    alone = plan.explain(tables, rows_per_step=300)
    assert found.trained_share > 1.1 * alone.trained_share
    assert f"window = {found.window}, expected_false_rows = " in str(found)
    for beside, named in (({"window": 4}, "window=4"), ({"threshold": 1.0}, "threshold=1.0")):
        with pytest.raises(ValueError, match=f"Expected noised_rows alone, got {named} beside it"):
            plan.explain(tables, noised_rows=300, **beside)
    with pytest.raises(
        ValueError, match="Expected noised_rows < 10000, half of all rows, got noised_rows="
    ):
        plan.explain(tables, noised_rows=10_000)
    with pytest.raises(ValueError, match="Expected window <= 200, the steps of the run, got"):
        plan.explain(tables, window=201)
    with pytest.raises(ValueError, match="Expected noised_rows > 0 and finite, got"):
        plan.explain(tables, noised_rows=0)
