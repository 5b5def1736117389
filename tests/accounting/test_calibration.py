"""The search for σ ends on the feasible side, within its tolerance, after few evaluations."""

import math

import pytest

from dp_sparse.accounting.calibration import (
    COARSE,
    FINE,
    LIMITS,
    smallest_meeting,
    smallest_noise_multiplier,
)


@pytest.mark.parametrize("wanted", [0.0101, 0.3, 0.75, 1.0, 7.3, 812.0, 9_999.0])
@pytest.mark.parametrize("pessimism", [-0.03, 0.0, 1e-5, 0.02])
def test_it_finds_the_smallest_that_meets(wanted: float, pessimism: float) -> None:
    """Whatever the coarse interval gets wrong, in either direction."""
    asked = {COARSE: 0, FINE: 0}

    def meets(sigma: float, interval: float) -> bool:
        asked[interval] += 1
        return sigma >= wanted * (1 + pessimism if interval == COARSE else 1)

    found = smallest_noise_multiplier(meets)
    assert wanted <= found <= wanted + 1.0001e-4
    assert asked[FINE] <= (4 if pessimism in (0.0, 1e-5) and wanted < 5 else 60)


def test_it_stops_at_the_least_noise() -> None:
    found = smallest_noise_multiplier(lambda sigma, interval: True)
    assert 0 < found <= LIMITS[0] + 1e-4


def test_no_noise_at_or_below_zero_is_tried() -> None:
    tried = []

    def meets(sigma: float, interval: float) -> bool:
        tried.append(sigma)
        return sigma >= (0.5 if interval == COARSE else 0.0)

    smallest_noise_multiplier(meets)
    assert min(tried) > 0


@pytest.mark.parametrize("wanted", [0.11, 3.0, 49.0, 51.0, 99.0, 123_456.0])
@pytest.mark.parametrize("relative", [True, False])
def test_any_noise_is_found_within_the_limits(wanted: float, relative: bool) -> None:
    tried = []

    def meets(noise: float) -> bool:
        tried.append(noise)
        return noise >= wanted

    limits = (0.1, 1e6)
    found = smallest_meeting(meets, (50, 100), factor=4, limits=limits, relative=relative)
    assert wanted <= found <= wanted + 1.0001e-4 * (wanted if relative else 1)
    assert limits[0] <= min(tried) and max(tried) <= limits[1]
    assert len(tried) < (25 if relative else 50)


def test_none_up_to_the_limit() -> None:
    tried: list[float] = []

    def meets(noise: float) -> bool:
        tried.append(noise)
        return False

    assert smallest_meeting(meets, (1, 2), factor=2, limits=(1, 64)) == math.inf
    assert tried == [2, 4, 8, 16, 32, 64]
