"""Privacy losses from curves, and Poisson samples of compositions, against exact small cases."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import integrate, stats

from dp_sparse.accounting import privacy_loss
from dp_sparse.accounting.accountant import Accountant
from dp_sparse.accounting.events import PureDpEvent
from dp_sparse.accounting.mechanisms import ExponentialSelection, GaussianMechanism

LOSSES = (0.05, 0.3, 1.0)


def delta_of(event: dp_accounting.DpEvent, epsilon: float, interval: float = 1e-4) -> float:
    accountant = Accountant(value_discretization_interval=interval)
    accountant.compose(event)
    return float(accountant.get_delta(epsilon))


def sampled(probability: float, *events: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    inner = dp_accounting.ComposedDpEvent(events)
    return dp_accounting.PoissonSampledDpEvent(probability, inner)


def exact_delta(
    with_example: np.ndarray, without: np.ndarray, sigma: float, q: float, epsilon: float
) -> float:
    """δ(ε) of one row chosen with these probabilities and a normal around 1 or 0, on a sample.

    The larger of both directions, by quadrature over the normal.
    """

    y = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)[:, np.newaxis]
    rest = without * stats.norm.pdf(y, 0, sigma)
    mixed = (1 - q) * rest + q * with_example * stats.norm.pdf(y, 1, sigma)

    def divergence(first: np.ndarray, second: np.ndarray) -> float:
        excess = np.maximum(first - math.exp(epsilon) * second, 0).sum(axis=1)
        return float(integrate.trapezoid(excess, y[:, 0]))

    return max(divergence(mixed, rest), divergence(rest, mixed))


@pytest.mark.cases(1)
@pytest.mark.parametrize("q", [0.02, 0.4, 1.0])
@pytest.mark.parametrize(("e0", "sigma"), [(0.5, 1.0), (2.0, 0.7), (0.03, 3.0)])
@pytest.mark.parametrize("epsilon", LOSSES)
def test_a_sampled_composition_is_exact(q: float, e0: float, sigma: float, epsilon: float) -> None:
    """Of randomised response and a Gaussian mechanism, which is what the event stands for."""
    truth = np.array([math.exp(e0), 1]) / (1 + math.exp(e0))
    exact = exact_delta(truth, truth[::-1], sigma, q, epsilon)
    found = delta_of(sampled(q, PureDpEvent(e0), dp_accounting.GaussianDpEvent(sigma)), epsilon)
    assert exact * (1 - 1e-6) - 1e-12 <= found <= exact * 1.002 + 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("q", [0.05, 0.5])
@pytest.mark.parametrize("scores", [(1.0, 0.0), (1.0, 0.4, 0.0), (0.7, 1.0, 1.0)])
def test_a_selection_costs_at_most_that(q: float, scores: tuple[float, ...]) -> None:
    """An exponential mechanism over few rows, the example adding `scores`, and its gradient."""
    e0, sigma = 0.9, 1.3
    weights = np.exp(e0 * np.array(scores))
    with_example, without = weights / weights.sum(), np.full(len(scores), 1 / len(scores))
    for epsilon in LOSSES:
        exact = exact_delta(with_example, without, sigma, q, epsilon)
        event = sampled(q, PureDpEvent(e0), dp_accounting.GaussianDpEvent(sigma))
        assert exact <= delta_of(event, epsilon)


def test_a_gaussian_in_parts_costs_what_it_costs_whole() -> None:
    whole, half = dp_accounting.GaussianDpEvent(1.0), dp_accounting.GaussianDpEvent(math.sqrt(2))
    for q, steps in [(0.01, 1000), (0.3, 20)]:
        native = dp_accounting.PoissonSampledDpEvent(q, whole)
        wanted = delta_of(dp_accounting.SelfComposedDpEvent(native, steps), 1.0)
        ours = delta_of(dp_accounting.SelfComposedDpEvent(sampled(q, half, half), steps), 1.0)
        assert ours == pytest.approx(wanted, rel=1e-3)
        apart = dp_accounting.PoissonSampledDpEvent(q, half)  # two samples: another mechanism
        assert delta_of(dp_accounting.SelfComposedDpEvent(apart, 2 * steps), 1.0) < 0.99 * wanted


def test_many_small_pure_mechanisms_cost_what_a_gaussian_costs() -> None:
    event = dp_accounting.SelfComposedDpEvent(PureDpEvent(0.02), 2500)
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    assert delta_of(event, 2.0) == pytest.approx(delta_of(gaussian, 2.0), rel=0.02)
    assert delta_of(PureDpEvent(0.02), 0.0201) < 1e-12 < delta_of(PureDpEvent(0.02), 0.0199)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-4, 0.00035, 0.7])
def test_a_pure_loss_off_the_grid_is_not_rounded_to_nothing(epsilon: float) -> None:
    loss = privacy_loss.of_pure(epsilon, 1e-4)
    exact = math.tanh(epsilon / 2)  # (e^ε − 1) / (e^ε + 1)
    assert exact * (1 - 1e-9) <= loss.get_delta_for_epsilon(0.0) <= exact * 1.01


def test_events_without_noise_spend_everything() -> None:
    event = sampled(0.1, PureDpEvent(0.1), dp_accounting.GaussianDpEvent(0.0))
    accountant = Accountant()
    accountant.compose(event)
    assert accountant.get_epsilon(1e-5) == math.inf
    unknown = sampled(0.1, dp_accounting.NonPrivateDpEvent(), dp_accounting.UnsupportedDpEvent())
    assert not Accountant().supports(unknown)


def test_the_price_of_a_selection() -> None:
    mechanism = ExponentialSelection(rows_per_step=400, noise_ratio=2.0)
    assert mechanism.epsilon_per_row(1.5) == pytest.approx(1 / (20 * 2 * 1.5))
    parts = mechanism.event(1.5)
    assert parts == dp_accounting.ComposedDpEvent(
        (
            dp_accounting.SelfComposedDpEvent(PureDpEvent(mechanism.epsilon_per_row(1.5)), 400),
            dp_accounting.GaussianDpEvent(1.5),
        )
    )
    joint = 1.5 / math.sqrt(1 + 2.0**-2)  # what Gaussian releases of both ratios would be together
    wanted = delta_of(GaussianMechanism().event(joint), 1.0)
    assert delta_of(parts, 1.0) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    "bad", [{"rows_per_step": 0}, {"rows_per_step": 2.5}, {"rows_per_step": 3, "noise_ratio": 0}]
)
def test_bad_numbers(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{list(bad)[-1]}={list(bad.values())[-1]}"):
        ExponentialSelection(**bad)  # type: ignore[arg-type]


def test_a_selection_that_costs_beyond_measure_spends_everything() -> None:
    accountant = Accountant()
    accountant.compose(ExponentialSelection(100, noise_ratio=1e-9).event(1.0))
    assert accountant.get_epsilon(1e-5) == math.inf


def test_deltas_are_those_of_the_worse_direction() -> None:
    """Whichever of the two is which."""
    loss = pld.from_gaussian_mechanism(0.8, sampling_prob=0.2)
    turned = PrivacyLossDistribution(loss._pmf_add, loss._pmf_remove)
    epsilons = np.array([0.0, *LOSSES, 5.0])
    wanted = [loss.get_delta_for_epsilon(epsilon) for epsilon in epsilons]
    assert loss._pmf_add.get_delta_for_epsilon(0.2) < 0.9 * loss.get_delta_for_epsilon(0.2)
    for either in (loss, turned):
        found = privacy_loss.deltas(either, epsilons)
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
        assert np.all(found >= wanted)


@pytest.mark.parametrize("delta", [0.3, 1e-2, 1e-6, 1e-12])
def test_epsilon_is_that_of_the_worse_direction(delta: float) -> None:
    loss = pld.from_gaussian_mechanism(0.8, sampling_prob=0.2)
    turned = PrivacyLossDistribution(loss._pmf_add, loss._pmf_remove)
    wanted = loss.get_epsilon_for_delta(delta)
    for either in (loss, turned):
        assert privacy_loss.least_epsilon(either, delta) == pytest.approx(wanted, rel=1e-9)


def test_no_epsilon_is_enough_for_what_is_infinite() -> None:
    loss = pld.from_privacy_parameters(DifferentialPrivacyParameters(0.5, 1e-3))
    assert privacy_loss.least_epsilon(loss, 0.9e-3) == math.inf
    assert privacy_loss.least_epsilon(loss, 1e-3) == pytest.approx(0.5, abs=1e-4)
    assert privacy_loss.least_epsilon(loss, 0.9) == 0


@pytest.mark.parametrize(("delta", "epsilon"), [(0.5, 5 + math.log(0.5)), (0.999, 0), (1, 0)])
def test_epsilon_below_the_least_loss(delta: float, epsilon: float) -> None:
    """Of the loss 5 alone δ(ε) = 1 − e^(ε − 5)."""
    one = DensePLDPmf(1e-4, 50_000, np.array([1.0]), 0.0, True)
    found = privacy_loss.least_epsilon(PrivacyLossDistribution(one), delta)
    assert found == pytest.approx(epsilon, abs=1e-9)
