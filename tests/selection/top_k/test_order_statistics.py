"""The largest of n draws: their joint distribution and tails; secret, distinct randomness."""

import itertools

import numpy as np
import pytest
from scipy import stats

from dp_sparse.selection.top_k.noise_sources import (
    distinct_integers,
    largest_quantiles,
    random_quantiles,
    secret_generator,
)
from tests.reference.distributions import SIGNIFICANCE, chi_square, largest_correlation_z

RNG = np.random.Generator(np.random.Philox(key=1))


def largest(draws: int, count: int, runs: int) -> np.ndarray:
    """log F of the `count` largest of `draws`, `[runs, count]`."""
    return np.array([largest_quantiles(draws, count, RNG).log_probability for _ in range(runs)])


def uniforms_of(log_probability: np.ndarray, draws: int) -> np.ndarray:
    """What must be independent uniforms if these are the largest of `draws`, `[runs, count]`."""
    gaps = -np.diff(log_probability, axis=1, prepend=0)
    return np.exp(-gaps * (draws - np.arange(log_probability.shape[1])))


@pytest.mark.parametrize(("draws", "count"), [(1, 1), (5, 5), (40, 7), (10**9, 6), (10**15, 3)])
def test_joint_distribution(draws: int, count: int) -> None:
    found = largest(draws, count, 10_000)
    uniforms = uniforms_of(found, draws)
    assert np.all(np.diff(found, axis=1) < 0)
    for column in uniforms.T:
        assert stats.kstest(column, "uniform").pvalue > SIGNIFICANCE
    if count > 1:
        limit = stats.norm.isf(SIGNIFICANCE / count**2)
        assert largest_correlation_z(uniforms) < limit
    wrong = uniforms_of(found, draws + max(1, draws // 5))  # the largest of a few more
    assert stats.kstest(wrong[:, 0], "uniform").pvalue < SIGNIFICANCE


def test_the_next_ones_are_of_fewer_draws() -> None:
    """Given the largest, the second largest is that of n − 1 draws; n throughout is wrong."""
    gaps = -np.diff(largest(4, 4, 10_000), axis=1, prepend=0)
    for wrong in np.exp(-4 * gaps[:, 1:]).T:
        assert stats.kstest(wrong, "uniform").pvalue < SIGNIFICANCE


def test_all_of_n_are_n_independent_draws() -> None:
    """Drawn in order and then shuffled, they are as n uniforms are."""
    found = RNG.permuted(np.exp(largest(6, 6, 10_000)), axis=1)
    for column in found.T:
        assert stats.kstest(column, "uniform").pvalue > SIGNIFICANCE
    assert largest_correlation_z(found) < stats.norm.isf(SIGNIFICANCE / 36)


def test_random_quantiles_are_uniform_to_the_tails() -> None:
    levels = random_quantiles(400_000, RNG)
    assert stats.kstest(np.exp(levels.log_probability), "uniform").pvalue > SIGNIFICANCE
    assert levels.tail.min() > 0 and levels.tail.max() <= 0.5
    for side in (True, False):  # the tail says on which side it is: both have every magnitude
        tail = 2 * levels.tail[levels.upper == side]
        assert stats.kstest(-np.log(tail), "expon").pvalue > SIGNIFICANCE


def test_tails_are_as_fine_as_64_bits() -> None:
    class Words:
        def integers(self, *args: object, **kwargs: object) -> np.ndarray:
            return np.array([0, 1, 2**64 - 1, 2**64 - 2], np.uint64)

    levels = random_quantiles(4, Words())  # type: ignore[arg-type]
    np.testing.assert_array_equal(levels.tail, [2.0**-65, 2.0**-65, 0.5, 0.5])
    np.testing.assert_array_equal(levels.upper, [False, True, True, False])


@pytest.mark.parametrize(("limit", "count"), [(6, 2), (6, 5), (40, 1), (5, 0), (0, 0), (3, 3)])
def test_distinct_integers(limit: int, count: int) -> None:
    runs = 6_000
    found = [tuple(sorted(distinct_integers(limit, count, RNG))) for _ in range(runs)]
    subsets = {subset: i for i, subset in enumerate(itertools.combinations(range(limit), count))}
    indices = [subsets[subset] for subset in found]
    if len(subsets) > 1:
        assert chi_square(indices, stats.randint(0, len(subsets))) > SIGNIFICANCE


def test_distinct_integers_of_many() -> None:
    found = distinct_integers(10**15, 100_000, RNG)
    assert len(np.unique(found)) == 100_000 and found.dtype == np.int64
    assert stats.kstest(found / 1e15, "uniform").pvalue > SIGNIFICANCE


def test_keys_are_secret() -> None:
    words = {int(secret_generator().integers(0, 2**63)) for _ in range(100)}
    assert len(words) == 100
