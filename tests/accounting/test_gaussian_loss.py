"""Losses of a sampled Gaussian mechanism against dp-accounting's own, one ε after the other."""

from typing import Any

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dp_sparse.accounting import privacy_loss


@given(st.floats(0.2, 20), st.floats(1e-6, 0.999), st.sampled_from([1e-2, 1e-3]))
@example(0.05, 0.3, 1e-2)  # losses beyond 200
@example(50.0, 1.0, 1e-4)
@settings(max_examples=20, deadline=None)
def test_losses_are_those_of_dp_accounting(sigma: float, q: float, interval: float) -> None:
    ours = privacy_loss.gaussian_loss(sigma, q, interval)
    theirs = pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=interval
    )
    for name in ("_pmf_remove", "_pmf_add"):
        found, wanted = (getattr(each, name).to_dense_pmf() for each in (ours, theirs))
        assert found._lower_loss == wanted._lower_loss
        assert found._infinity_mass == pytest.approx(wanted._infinity_mass, rel=1e-9, abs=1e-21)
        np.testing.assert_allclose(found._probs, wanted._probs, rtol=1e-6, atol=1e-12)


def test_no_loss_overflows() -> None:
    """δ at ε = 800, beyond what e^ε can be; the probability of a loss of 1,250 is a half."""
    loss = privacy_loss.gaussian_loss(0.02, 0.5, 1.0)
    assert loss._pmf_remove.get_delta_for_epsilon(800.0) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("sigma", "q"),
    [(0.02, 0.1), (0.1, 1 - 1e-12), (0.2, 1 - 2**-53), (0.7, 0.3), (1.0, 1.0), (5.0, 1e-6)],
)
@pytest.mark.parametrize("removed", [True, False])
def test_deltas_are_those_of_exact_arithmetic_but_for_the_error_that_is_added(
    sigma: float, q: float, removed: bool
) -> None:
    adjacency = AdjacencyType.REMOVE if removed else AdjacencyType.ADD
    loss = privacy_loss._GaussianLoss(sigma, sampling_prob=q, adjacency_type=adjacency)
    bounds = loss.connect_dots_bounds()
    epsilons = np.linspace(bounds.epsilon_lower, bounds.epsilon_upper, 200)
    if q < 1:  # where the output goes to infinity
        epsilons = np.append(epsilons, np.linspace(0.999, 1, 50) * -np.log1p(-q))
    found = loss.get_delta_for_epsilon(epsilons)
    error = privacy_loss._CURVE[0] + privacy_loss._CURVE[1] * bounds.epsilon_upper
    with mpmath.workdps(60):
        for epsilon, delta in zip(epsilons.tolist(), found.tolist(), strict=True):
            exact, above = exact_delta(sigma, q, epsilon, removed)
            assert abs(delta - exact) <= error * above + 1e-30, epsilon


def exact_delta(sigma: float, q: float, epsilon: float, removed: bool) -> tuple[Any, Any]:
    """δ(ε) and P[loss >= ε], of outputs up to x."""
    sign = 1 if removed else -1
    inside = 1 + mpmath.expm1(sign * mpmath.mpf(epsilon)) / mpmath.mpf(q)
    x = sign * (mpmath.inf if inside <= 0 else -0.5 - mpmath.mpf(sigma) ** 2 * mpmath.log(inside))
    alone = mpmath.ncdf(x / sigma)
    mixed = (1 - mpmath.mpf(q)) * alone + q * mpmath.ncdf((x + sign) / sigma)
    upper, lower = (mixed, alone) if removed else (alone, mixed)
    return upper - mpmath.exp(epsilon) * lower, upper
