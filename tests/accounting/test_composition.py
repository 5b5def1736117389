"""Losses added up: never below exact arithmetic, hardly above, however the processor rounds."""

import itertools
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dp_sparse.accounting import privacy_loss
from dp_sparse.accounting.accountant import Accountant, epsilon_of
from dp_sparse.accounting.composition import composed
from tests.reference import composition as reference

# DP-SGD on Criteo, five epochs at δ = 1/4.5e7: float64 gives 0.98993 with AVX-512, 0.98990 without.
PROBABILITY, SIGMA, STEPS, DELTA = 4.4676536530911005e-05, 0.6010345458984375, 111_916, 1 / 4.5e7
EXACT = 0.98999502  # of dp-accounting's losses at interval 1e-4, in extended precision


def loss_of(probabilities: list[float], lowest: int, infinite: float = 0.0) -> DensePLDPmf:
    return DensePLDPmf(0.5, lowest, np.array(probabilities), infinite, True)


def exact_sums(parts: list[tuple[DensePLDPmf, int]]) -> dict[int, Fraction]:
    """By rational arithmetic, outcome by outcome."""
    sums = {0: Fraction(1)}
    for loss, count in parts:
        for _ in range(count):
            following: dict[int, Fraction] = {}
            for (at, mass), (place, p) in itertools.product(sums.items(), enumerate(loss._probs)):
                key = at + loss._lower_loss + place
                if p:
                    following[key] = following.get(key, Fraction(0)) + mass * Fraction(float(p))
            sums = following
    return sums


@pytest.mark.parametrize(
    "parts",
    [
        [(loss_of([0.25, 0.5, 0.25], -1), 9)],
        [(loss_of([1e-12, 1 - 1e-6, 0.0, 0.0, 1e-6], -2), 30)],
        [(loss_of([0.7, 0.3 - 1e-9, 1e-9], -1), 12), (loss_of([0.5, 0.0, 0.5], 3), 7)],
        [(loss_of([1.0], 4), 5), (loss_of([0.9, 0.1], 0), 2)],
        [(loss_of(list(np.full(40, 1 / 40)), -3), 2), (loss_of([0.5, 0.5], 0), 1)],
        [(loss_of([0.0] * 2000 + [0.5, 0.5] + [0.0] * 9000, -7), 3)],
    ],
    ids=["wide", "rare", "two", "certain", "flat", "zeros"],
)
def test_probabilities_are_exact_ones_rounded_up(parts: list[tuple[DensePLDPmf, int]]) -> None:
    found = composed([(PrivacyLossDistribution(loss), count) for loss, count in parts])._pmf_remove
    assert isinstance(found, DensePLDPmf)
    exact = exact_sums(parts)
    places = range(found._lower_loss, found._lower_loss + found.size)
    outside = sum(mass for place, mass in exact.items() if place not in places)
    assert outside <= found._infinity_mass <= 3e-20
    total = sum(count for _, count in parts)
    for place, probability in zip(places, found._probs, strict=True):
        wanted = exact.get(place, Fraction(0))
        assert Fraction(float(probability)) >= wanted
        assert float(probability) <= float(wanted) * (1 + 1e-9) + 1e-14 * total


def test_what_is_infinite_adds_up() -> None:
    loss = PrivacyLossDistribution(loss_of([0.5, 0.5 - 1e-9], 0, infinite=1e-9))
    found = composed([(loss, 1000)])._pmf_remove
    assert found._infinity_mass == pytest.approx(-math.expm1(1000 * math.log1p(-1e-9)), rel=1e-9)


def test_nothing_added_changes_nothing() -> None:
    loss = PrivacyLossDistribution(loss_of([0.5, 0.5], 1))
    nothing = pld.identity(0.5)
    found = composed([(nothing, 1), (loss, 1)])._pmf_remove
    assert found.size == 2 and found.get_delta_for_epsilon(0.6) == loss.get_delta_for_epsilon(0.6)
    assert composed([(nothing, 1), (nothing, 3)]).get_epsilon_for_delta(1e-9) == 0


def test_a_long_run_is_never_understated() -> None:
    """What float64 itself does: dp-accounting's own composition is below by 6e-5 or more."""
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(PROBABILITY, dp_accounting.GaussianDpEvent(SIGMA)),
        STEPS,
    )
    # Above by the rounding of one step (1.3e-5 of ε, see selection/top_k/test_calibration.py).
    assert EXACT <= epsilon_of(event, DELTA, 1e-4) <= EXACT + 2e-5
    plain = PLDAccountant(value_discretization_interval=1e-4)
    plain.compose(event)
    assert abs(plain.get_epsilon(DELTA) - EXACT) > 2e-5


@pytest.mark.cases(1)
@pytest.mark.skipif(not reference.EXTENDED, reason="long double is no wider than double here")
@pytest.mark.parametrize(
    ("probability", "sigma", "steps", "delta"),
    [(PROBABILITY, SIGMA, STEPS, DELTA), (1e-2, 1.0, 20_000, 1e-6), (1e-3, 0.5, 3, 1e-6)],
)
def test_composition_against_extended_precision(
    probability: float, sigma: float, steps: int, delta: float
) -> None:
    one = pld.from_gaussian_mechanism(sigma, sampling_prob=probability)
    ours = composed([(one, steps)])._pmf_remove.to_dense_pmf()
    size = 2 ** math.ceil(math.log2(1.5 * ours.size))
    first = ours._lower_loss - (size - ours.size) // 2
    exact = reference.composed([(one._pmf_remove, steps)], first, size, 0.0)
    for target in (delta, 1e3 * delta):
        wanted = exact.get_epsilon_for_delta(target)
        assert wanted - 1e-8 <= ours.get_epsilon_for_delta(target) <= wanted + 5e-5


@pytest.mark.parametrize("sampled", [False, True])
def test_the_curve_of_one_step_is_not_below_the_truth(sampled: bool) -> None:
    """δ(ε) of the grid's losses, summed exactly, against 50 digits."""
    mpmath = pytest.importorskip("mpmath")
    q, sigma, interval = (0.0152 if sampled else 1.0), 1.14, 1e-3
    one = pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=interval
    )
    pmf = privacy_loss.rounded_up(one)._pmf_remove.to_dense_pmf()
    with mpmath.workdps(50):
        for place in range(40, pmf.size - 1, 700):
            epsilon = interval * (place + pmf._lower_loss)
            if epsilon <= 0:
                continue
            rest = pmf._probs[place:]
            curve = mpmath.mpf(pmf._infinity_mass) + mpmath.fsum(
                mpmath.mpf(p) * -mpmath.expm1(-interval * mpmath.mpf(i))
                for i, p in enumerate(rest.tolist())
            )
            x = -0.5 - sigma**2 * mpmath.log1p(mpmath.expm1(epsilon) / q)
            above = (1 - mpmath.mpf(q)) * mpmath.ncdf(x / sigma) + q * mpmath.ncdf((x + 1) / sigma)
            exact = above - mpmath.exp(epsilon) * mpmath.ncdf(x / sigma)
            assert exact <= curve <= exact * (1 + 1e-9) + 1e-25


def test_epsilon_meets_its_delta() -> None:
    accountant = Accountant()
    accountant.compose(dp_accounting.GaussianDpEvent(1.3), 7)
    for delta in (1e-3, 1e-6, 1e-10):
        epsilon = accountant.get_epsilon(delta)
        assert accountant.get_delta(epsilon) <= delta < accountant.get_delta(epsilon - 1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.dp_event.DiscreteLaplaceDpEvent(0.5, 1),
        dp_accounting.dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.0], [0.5, 0.5]),
        dp_accounting.TruncatedSubsampledGaussianDpEvent(1000, 0.02, 40, 1.0),
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(3.0)),
        dp_accounting.LaplaceDpEvent(3.0),
        dp_accounting.NoOpDpEvent(),
        dp_accounting.GaussianDpEvent(0.0),
        dp_accounting.PoissonSampledDpEvent(0.0, dp_accounting.GaussianDpEvent(1.0)),
    ],
)
def test_every_event_of_dp_accounting_costs_what_it_says(event: dp_accounting.DpEvent) -> None:
    ours = Accountant(value_discretization_interval=1e-3).compose(event, 3).get_epsilon(1e-5)
    theirs = PLDAccountant(value_discretization_interval=1e-3).compose(event, 3).get_epsilon(1e-5)
    assert ours == theirs or theirs - 1e-7 <= ours <= theirs + 1e-5
