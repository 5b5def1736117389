"""Differences between runs: paired by rows and by seeds."""

import numpy as np
import pytest

from pipelines.resampling import RESAMPLES, difference, draws, resampled_accuracy


def test_draws_are_those_of_a_number_of_rows() -> None:
    first, second = list(draws(50)), list(draws(50))
    np.testing.assert_array_equal(first, second)
    assert len(first) == RESAMPLES and {int(times.sum()) for times in first} == {50}
    assert len({times.tobytes() for times in first}) == RESAMPLES


def test_accuracy_of_draws() -> None:
    """It deviates as a binomial share does."""
    right = np.arange(4_000) % 4 > 0
    found = resampled_accuracy(right)
    times = next(draws(4_000))
    assert found[0] == pytest.approx(np.repeat(right, times).mean(), abs=1e-5)
    expected = (0.75 * 0.25 / 4_000) ** 0.5
    assert 0.75 * expected < np.std(found, ddof=1) < 1.3 * expected


def test_a_difference_is_of_the_seeds_that_both_have() -> None:
    def run(seed: int, shift: float) -> dict[str, object]:
        return {"seed": seed, "resampled": [0.5 + shift, 0.7 + shift]}

    runs, base = [run(0, 0.1), run(1, 0.1), run(2, 0.1)], [run(1, 0.0), run(2, 0.0)]
    ahead, error = difference(runs, [9.0, 0.7, 0.8], base, [0.6, 0.6])
    assert ahead == pytest.approx(0.15)
    assert error == pytest.approx(np.std([0.1, 0.2], ddof=1) / 2**0.5)


def test_the_error_of_one_seed_is_that_of_other_rows() -> None:
    runs, base = [{"seed": 0, "resampled": [0.5, 0.7]}], [{"seed": 0, "resampled": [0.5, 0.6]}]
    assert difference(runs, [0.6], base, [0.5])[1] == pytest.approx(np.std([0, 0.1], ddof=1))
