"""The search for σ ends on the feasible side, within its tolerance, after few evaluations."""

import math
import warnings
from collections.abc import Callable

import pytest

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.calibration import (
    COARSE,
    FINE,
    LIMITS,
    smallest_meeting,
    smallest_noise_multiplier,
)
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.sampling import PoissonSampling


def power_law(wanted: float, power: float) -> Callable[[float], float]:
    """ε = 2 at the noise that is wanted."""
    return lambda noise: 2.0 * (wanted / noise) ** power


def jump(wanted: float, _: float) -> Callable[[float], float]:
    """No ε below the noise that is wanted, and none at all from there on."""
    return lambda noise: math.inf if noise < wanted else 0.0


def bent(wanted: float, power: float) -> Callable[[float], float]:
    """Steep below, flat above."""
    return lambda noise: 2.0 * (wanted / noise) ** (9 * power if noise < wanted else power / 9)


MOST = {power_law: (6, 16), jump: (60, 60), bent: (100, 100)}  # evaluations, fine and coarse


@pytest.mark.parametrize("wanted", [0.0101, 0.3, 0.75, 1.0, 7.3, 812.0, 9_999.0])
@pytest.mark.parametrize("pessimism", [-0.03, 0.0, 1e-5, 0.02])
@pytest.mark.parametrize("curve", [power_law, jump, bent])
def test_it_finds_the_smallest_that_meets(
    wanted: float, pessimism: float, curve: Callable[..., Callable[[float], float]]
) -> None:
    """Whatever the coarse interval gets wrong, in either direction."""
    asked = {COARSE: 0, FINE: 0}

    def epsilon(sigma: float, interval: float) -> float:
        asked[interval] += 1
        return curve(wanted * (1 + pessimism if interval == COARSE else 1), 1.3)(sigma)

    found = smallest_noise_multiplier(epsilon, 2.0)
    assert wanted * (1 - 1e-15) <= found <= wanted + 1.0001e-4
    assert asked[FINE] <= MOST[curve][0] and asked[COARSE] <= MOST[curve][1]


def test_it_stops_at_the_least_noise() -> None:
    found = smallest_noise_multiplier(lambda sigma, interval: 1.0, 2.0)
    assert 0 < found <= LIMITS[0] + 1e-4


def test_no_noise_at_or_below_zero_is_tried() -> None:
    tried = []

    def epsilon(sigma: float, interval: float) -> float:
        tried.append(sigma)
        return 0.0 if sigma >= (0.5 if interval == COARSE else 0.0) else 3.0

    smallest_noise_multiplier(epsilon, 2.0)
    assert min(tried) > 0


@pytest.mark.parametrize("wanted", [0.11, 3.0, 49.0, 51.0, 99.0, 123_456.0])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("curve", [power_law, jump, bent])
def test_any_noise_is_found_within_the_limits(
    wanted: float, relative: bool, curve: Callable[..., Callable[[float], float]]
) -> None:
    tried = []

    def epsilon(noise: float) -> float:
        tried.append(noise)
        return curve(wanted, 0.5)(noise)

    limits = (0.1, 1e6)
    found = smallest_meeting(epsilon, 2.0, 100.0, limits=limits, relative=relative)
    assert wanted * (1 - 1e-15) <= found <= wanted + 1.0001e-4 * (wanted if relative else 1)
    assert limits[0] <= min(tried) and max(tried) <= limits[1]
    assert len(tried) < MOST[curve][1]


def test_epsilon_that_differs_in_its_last_bit_does_not_meet() -> None:
    above = math.nextafter(2.0, 3.0)
    found = smallest_meeting(
        lambda noise: above if noise < 5 else 2.0, 2.0, 1.0, limits=(0.1, 100.0)
    )
    assert 5 <= found <= 5.0001


def test_what_cannot_be_computed_does_not_meet() -> None:
    found = smallest_meeting(
        lambda noise: math.nan if noise < 5 else 1e-320, 2.0, 1.0, limits=(0.1, 100.0)
    )
    assert 5 <= found <= 5.0001
    assert smallest_meeting(lambda noise: math.nan, 2.0, 1.0, limits=(0.1, 9.0)) == math.inf


def test_none_up_to_the_limit() -> None:
    tried: list[float] = []

    def epsilon(noise: float) -> float:
        tried.append(noise)
        return math.inf

    assert smallest_meeting(epsilon, 2.0, 2.0, limits=(1, 64)) == math.inf
    assert tried == pytest.approx([2, 8, 32, 64])


# --------------------------------------------------------------------------------- hopeless budgets


@pytest.mark.parametrize("batch", [1, 5, 10])
def test_a_budget_that_no_setting_makes_useful_is_said(batch: int) -> None:
    sampling = PoissonSampling(10, batch, 20)
    with pytest.warns(UserWarning, match="No training can learn from num_examples=10"):
        plan = PrivacyPlan(PrivacyBudget(0.01, 0.01), sampling).calibrate()
    assert math.sqrt(20) * batch < (plan.noise_multiplier or 0.0)


@pytest.mark.slow
def test_a_budget_for_more_examples_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyPlan(PrivacyBudget(0.1, 1e-4), PoissonSampling(10_000, 100, 20)).calibrate()
        PrivacyPlan(PrivacyBudget(8.0, 0.01), PoissonSampling(10, 5, 20)).calibrate()
