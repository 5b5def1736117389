"""Geometric skips: counts, positions and gaps against their distributions, for any c and p."""

import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from dp_sparse import noise
from dp_sparse.selection import threshold
from tests.reference.distributions import SIGNIFICANCE, binomial, chi_square
from tests.reference.sampling import GAPS, geometric_gap

RUNS = 2000
NONE = -1

# c, p, P[no success], P[first success ≤ k] by k (counted from 1): from derivation.
REGIMES = [
    (1000, 0.01, 4.3171247410658195e-05, {1: 0.01, 10: 0.09561792499119552}),
    (
        1_000_000,
        1e-4,
        3.7015207857526025e-44,
        {10: 0.0009995501199790025, 1000: 0.09516710644145375},
    ),
    (1_000_000, 1.9e-8, 0.9811793620657031, {1_000_000: 0.01882063793429687}),
    (64_300, 3e-5, 0.1452892151920581, {1000: 0.029554903160617867, 64_300: 0.8547107848079419}),
    (
        2_000_000,
        2.866515719e-07,
        0.563660462299231,
        {1000: 0.000286610532, 2_000_000: 0.4363395377},
    ),
]


def new_draw() -> noise.Draw:
    return noise.NoiseKey().next_draw()


def repeated(num_trials: int, probability: float, runs: int, width: int) -> np.ndarray:
    """The first `width` hits of independent runs, -1 where there is none: int64 `[runs, width]`."""
    key = noise.NoiseKey()

    @tf.function
    def run(_: tf.Tensor) -> tf.Tensor:
        hits = threshold.geometric_skips(key.next_draw(), num_trials, probability)
        padded = tf.concat([hits, tf.fill([width], tf.constant(NONE, tf.int64))], 0)
        return tf.ensure_shape(padded[:width], [width])

    return tf.map_fn(run, tf.zeros([runs], tf.int64)).numpy()


def counts_of(num_trials: int, probability: float, runs: int = RUNS) -> np.ndarray:
    expected = num_trials * probability
    width = int(expected + 12 * math.sqrt(expected) + 30)
    return np.sum(repeated(num_trials, probability, runs, width) != NONE, axis=1)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("num_trials", "probability", "none", "first_hit"), REGIMES)
def test_numbers_of_hits_and_first_hits(
    num_trials: int, probability: float, none: float, first_hit: dict[int, float]
) -> None:
    expected = num_trials * probability
    hits = repeated(num_trials, probability, RUNS, int(expected + 12 * math.sqrt(expected) + 30))
    counts = np.sum(hits != NONE, axis=1)
    assert chi_square(counts, stats.binom(num_trials, probability)) > SIGNIFICANCE
    assert binomial(np.sum(counts == 0), RUNS, none) > SIGNIFICANCE
    first = np.where(hits[:, 0] == NONE, num_trials, hits[:, 0]) + 1
    for trial, chance in first_hit.items():
        assert binomial(np.sum(first <= trial), RUNS, chance) > SIGNIFICANCE


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("num_trials", "probability", "wrong"),
    [(1000, 0.01, 1.15), (1_000_000, 1e-4, 1.05), (64_300, 3e-5, 1.3), (1_000_000, 1.9e-8, 4.0)],
)
def test_the_test_rejects_another_probability(
    num_trials: int, probability: float, wrong: float
) -> None:
    counts = counts_of(num_trials, probability)
    assert chi_square(counts, stats.binom(num_trials, probability * wrong)) < SIGNIFICANCE


@pytest.mark.parametrize("num_trials", [10**9, 10**10])
def test_huge_ranges(num_trials: int) -> None:
    runs, expected = 600, 32.0
    hits = repeated(num_trials, expected / num_trials, runs, 150)
    counts = np.sum(hits != NONE, axis=1)
    assert chi_square(counts, stats.binom(num_trials, expected / num_trials)) > SIGNIFICANCE
    assert chi_square(counts, stats.binom(num_trials, 1.15 * expected / num_trials)) < SIGNIFICANCE
    positions = hits[hits != NONE]
    assert positions.dtype == np.int64 and positions.max() < num_trials and positions.min() >= 0
    assert stats.kstest(positions / num_trials, "uniform").pvalue > SIGNIFICANCE
    assert stats.kstest((positions / num_trials) ** 1.1, "uniform").pvalue < SIGNIFICANCE
    assert np.any(positions > 0.99 * num_trials)


def test_gaps_are_geometric() -> None:
    probability = 0.2
    hits = threshold.geometric_skips(new_draw(), 200_000, probability).numpy()
    gaps = np.diff(hits, prepend=-1)[:30_000]
    assert chi_square(gaps, stats.geom(probability)) > SIGNIFICANCE
    assert chi_square(gaps, stats.geom(probability * 1.06)) < SIGNIFICANCE
    assert stats.pearsonr(gaps[:-1], gaps[1:]).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("probability", "gaps"), GAPS)
def test_gap_of_a_uniform(probability: float, gaps: dict[float, int]) -> None:
    uniforms = tf.constant(list(gaps), tf.float64)
    found = threshold._gaps(uniforms, probability, 10**12).numpy()
    np.testing.assert_array_equal(found, list(gaps.values()))
    assert found.tolist() == [geometric_gap(uniform, probability) for uniform in gaps]


def test_the_longest_gap_is_not_cut() -> None:
    """The smallest uniform is 2⁻⁵⁴: 37.4 mean gaps. Float32 uniforms would end at 16.6."""
    gap = int(threshold._gaps(tf.constant([2.0**-54], tf.float64), 1e-9, 10**12)[0])
    assert gap == pytest.approx(54 * math.log(2) * 1e9, rel=1e-6)


@pytest.mark.parametrize("num_trials", [1, 2, 7, 1000])
def test_probability_one_hits_every_trial(num_trials: int) -> None:
    hits = threshold.geometric_skips(new_draw(), num_trials, 1.0).numpy()
    np.testing.assert_array_equal(hits, np.arange(num_trials))


@pytest.mark.parametrize("num_trials", [1, 7, 10**10])
@pytest.mark.parametrize("probability", [0.0, 5e-324, 1e-300, 1e-25])
def test_hopeless_probabilities_hit_nothing(num_trials: int, probability: float) -> None:
    hits = threshold.geometric_skips(new_draw(), num_trials, probability)
    assert hits.shape == [0] and hits.dtype == tf.int64


@pytest.mark.cases(2)
@pytest.mark.parametrize("probability", [0.01, 0.3, 0.97])
def test_a_single_trial(probability: float) -> None:
    counts = counts_of(1, probability, runs=2000)
    assert set(counts) <= {0, 1}
    assert binomial(counts.sum(), 2000, probability) > SIGNIFICANCE
    assert binomial(counts.sum(), 2000, (probability + 0.15) % 1) < SIGNIFICANCE


@pytest.mark.parametrize(
    ("num_trials", "probability"), [(50, 0.5), (50, 0.999), (1000, 0.03), (10**6, 1e-3)]
)
def test_hits_increase_and_stay_in_range(num_trials: int, probability: float) -> None:
    for _ in range(20):
        hits = threshold.geometric_skips(new_draw(), num_trials, probability).numpy()
        assert np.all(np.diff(hits) > 0)
        assert len(hits) == 0 or (hits[0] >= 0 and hits[-1] < num_trials)


@pytest.mark.parametrize("chunk", [2, 4, 10, 32])
def test_a_short_chunk_is_continued(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the gaps are cut into chunks, they are one stream: the hits are the same."""
    draw = new_draw()
    whole = threshold.geometric_skips(draw, 5000, 0.01).numpy()
    assert len(whole) > 10
    monkeypatch.setattr(threshold, "most_skips", lambda *given: chunk)
    np.testing.assert_array_equal(threshold.geometric_skips(draw, 5000, 0.01).numpy(), whole)
    in_graph = tf.function(lambda: threshold.geometric_skips(draw, 5000, 0.01))
    np.testing.assert_array_equal(in_graph().numpy(), whole)


def test_continued_chunks_have_the_right_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "most_skips", lambda *given: 4)
    counts = counts_of(64_300, 3e-4, runs=1500)
    assert chi_square(counts, stats.binom(64_300, 3e-4)) > SIGNIFICANCE
    assert chi_square(counts, stats.binom(64_300, 3.5e-4)) < SIGNIFICANCE


@pytest.mark.parametrize("expected", [0.0, 0.019, 1.0, 32.0, 1e4, 1e6])
def test_one_chunk_is_nearly_always_enough(expected: float) -> None:
    chunk = threshold.most_skips(10**9, expected / 10**9)
    assert chunk % 2 == 0
    assert stats.poisson.sf(chunk - 1, expected) < math.exp(-30)
    assert chunk <= expected + 8 * math.sqrt(expected) + 26
