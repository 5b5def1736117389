"""What is (0, δ)-private: its curve, what it adds to others, and that it covers both directions."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from dp_sparse.accounting.accountant import Accountant, accountant_of, epsilon_of
from dp_sparse.accounting.calibration import FINE
from dp_sparse.accounting.events import DeltaDpEvent

EPSILONS = np.array([0.0, 0.3, 1.0, 3.0])
GAUSSIAN = dp_accounting.GaussianDpEvent(1.5)


def gaussian_delta(epsilons: np.ndarray, sigma: float) -> np.ndarray:
    """Of a Gaussian mechanism, exact, also at ε < 0 (Balle and Wang 2018)."""
    above = stats.norm.cdf(0.5 / sigma - epsilons * sigma)
    return above - np.exp(epsilons) * stats.norm.cdf(-0.5 / sigma - epsilons * sigma)


@pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.4])
def test_the_curve_is_delta_at_every_epsilon(delta: float) -> None:
    found = accountant_of(DeltaDpEvent(delta), FINE).deltas(EPSILONS)
    np.testing.assert_allclose(found, delta, rtol=1e-6, atol=1e-12)
    assert np.all(found >= delta)
    assert epsilon_of(DeltaDpEvent(delta), 1.01 * delta, FINE) == 0
    assert epsilon_of(DeltaDpEvent(delta), 0.99 * delta, FINE) == math.inf


def test_several_of_them() -> None:
    event = dp_accounting.SelfComposedDpEvent(DeltaDpEvent(0.01), 7)
    found = accountant_of(event, FINE).deltas(EPSILONS)
    np.testing.assert_allclose(found, 1 - 0.99**7, rtol=1e-6)


@pytest.mark.parametrize("delta", [1e-6, 1e-2])
def test_beside_a_gaussian_mechanism(delta: float) -> None:
    """δ + (1 − δ)·δ_G, and with another δ something else."""
    both = dp_accounting.ComposedDpEvent((GAUSSIAN, DeltaDpEvent(delta)))
    found = accountant_of(both, FINE).deltas(EPSILONS)
    exact = delta + (1 - delta) * gaussian_delta(EPSILONS, 1.5)
    assert np.all(found >= exact)
    np.testing.assert_allclose(found, exact, rtol=1e-3)
    for wrong in (0.0, 2 * delta):
        other = wrong + (1 - wrong) * gaussian_delta(EPSILONS, 1.5)
        assert np.max(np.abs(found - other)) > 0.5 * delta


@pytest.mark.parametrize("chance", [1e-4, 0.05, 0.6])
def test_an_example_that_may_show_itself_is_covered_in_both_directions(chance: float) -> None:
    """With it a sum and, with some chance, a value of its own; without it the sum alone."""
    both = dp_accounting.ComposedDpEvent((GAUSSIAN, DeltaDpEvent(chance)))
    bound = accountant_of(both, FINE).deltas(EPSILONS)
    removed = chance + (1 - chance) * gaussian_delta(EPSILONS, 1.5)
    added = gaussian_delta(EPSILONS + math.log1p(-chance), 1.5)  # what shows it is not released
    assert np.all(bound >= removed) and np.all(bound >= added)
    assert np.all(added > gaussian_delta(EPSILONS, 1.5))  # the sum alone would be too little


def test_certainty_has_no_epsilon() -> None:
    assert epsilon_of(DeltaDpEvent(1.0), 1e-5, FINE) == math.inf
    assert Accountant().supports(DeltaDpEvent(0.1))
