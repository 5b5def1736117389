"""The best membership test, against the exact trade-off of Gaussians and against brute force."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from dp_sparse.accounting import accountant
from dp_sparse.accounting import plan as plans
from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.mechanisms import Release
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.accounting.statement import EPSILONS, true_positive_rate
from dp_sparse.sampling import PoissonSampling, Sampling, StreamSampling
from tests.reference import attack_power as reference

RATES = [1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9]
SIGMAS = [0.4, 1.0, 3.0, 20.0]


def plan(sampling: Sampling, sigma: float, delta: float = 1e-5, *releases: Release) -> PrivacyPlan:
    return PrivacyPlan(
        PrivacyBudget(1.0, delta), sampling, releases=releases, noise_multiplier=sigma
    )


def whole_batch(steps: int = 1) -> PoissonSampling:
    return PoissonSampling(1000, 1000, steps)


def of_gaussian(rate: float, sigma: float) -> float:
    """Φ(Φ⁻¹(FPR) + 1/σ)."""
    return float(stats.norm.cdf(stats.norm.ppf(rate) + 1 / sigma))


# ------------------------------------------------------------------------------- against the truth


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("sigma", SIGMAS)
def test_one_gaussian_step(rate: float, sigma: float) -> None:
    found = plan(whole_batch(), sigma).attack_power(rate)
    assert of_gaussian(rate, sigma) <= found <= of_gaussian(rate, sigma) + 1e-3


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_another_noise_multiplier_is_rejected(sigma: float, factor: float) -> None:
    """The test above would see it, at a rate of false positives of 1 % or 10 %."""
    wrong = plan(whole_batch(), factor * sigma)
    off = [wrong.attack_power(rate) - of_gaussian(rate, sigma) for rate in (1e-2, 0.1)]
    assert min(off) < 0 if factor > 1 else max(off) > 1e-3


def test_many_steps_of_the_whole_dataset_are_one_gaussian() -> None:
    for sampling in (whole_batch(16), StreamSampling(1000, 100, passes=16)):
        exact = of_gaussian(0.01, 4.0 / math.sqrt(16))
        assert exact <= plan(sampling, 4.0).attack_power(0.01) <= exact + 1e-3


@pytest.mark.parametrize("examples", [2, 3, 10])
@pytest.mark.parametrize("rate", [1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("sigma", [1.0, 3.0, 20.0])
def test_a_group_of_one_gaussian_step_is_a_gaussian_of_less_noise(
    rate: float, sigma: float, examples: int
) -> None:
    """Exactly k times the shift; each neighbour in the row adds the grid's error."""
    found = plan(whole_batch(), sigma).attack_power(rate, examples=examples)
    exact = of_gaussian(rate, sigma / examples)
    assert exact - 1e-12 <= found <= exact + 1e-4


def test_a_group_of_a_poisson_sample_is_above_its_true_test() -> None:
    """Two examples that join a batch independently: none, one or both are in it."""
    probability, sigma = 0.1, 0.5
    edges = np.linspace(-9 * sigma, 2 + 9 * sigma, 3001)
    middles = (edges[1:] + edges[:-1]) / 2
    none, one, both = (stats.norm.pdf(middles, mean, sigma) for mean in (0, 1, 2))
    weights = ((1 - probability) ** 2, 2 * probability * (1 - probability), probability**2)
    inside = weights[0] * none + weights[1] * one + weights[2] * both
    sampling = PoissonSampling(1000, 1000 * probability, 1, capacity=1000)
    for rate in (1e-3, 1e-2, 0.1, 0.5):
        exact = reference.true_positive_rate(none / none.sum(), inside / inside.sum(), rate)
        found = plan(sampling, sigma).attack_power(rate, examples=2)
        assert exact - 1e-6 <= found < 0.99
        assert found > plan(sampling, sigma).attack_power(rate)


def test_a_group_needs_an_example() -> None:
    for examples in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="examples"):
            plan(whole_batch(), 1.0).attack_power(0.1, examples=examples)  # type: ignore[arg-type]


def densities(probability: float, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Masses of one step without the example and with it, which is in the batch at times."""
    edges = np.linspace(-9 * sigma, 1 + 9 * sigma, 3001)
    middles = (edges[1:] + edges[:-1]) / 2
    without, inside = (stats.norm.pdf(middles, mean, sigma) for mean in (0, 1))
    without, inside = without / np.sum(without), inside / np.sum(inside)
    return without, (1 - probability) * without + probability * inside


@pytest.mark.cases(2)
@pytest.mark.parametrize(("probability", "sigma"), [(0.1, 0.5), (0.5, 1.0), (0.02, 0.4)])
def test_one_step_of_a_poisson_sample(probability: float, sigma: float) -> None:
    masses = densities(probability, sigma)
    sampling = PoissonSampling(1000, 1000 * probability, 1, capacity=1000)
    for rate in (1e-3, 1e-2, 0.1, 0.5):
        exact = reference.true_positive_rate(*masses, rate)
        found = plan(sampling, sigma).attack_power(rate)
        assert exact - 1e-6 <= found <= exact + 1e-3  # the reference loses some in its cells
    for wrong in (2 / 3, 3 / 2):
        other = reference.true_positive_rate(*densities(wrong * probability, sigma), 0.1)
        assert abs(plan(sampling, sigma).attack_power(0.1) - other) > 2e-3


def test_the_reference_is_the_trade_off_of_gaussians() -> None:
    without, inside = densities(1.0, 1.0)
    for rate in (1e-3, 1e-2, 0.5):
        assert reference.true_positive_rate(without, inside, rate) == pytest.approx(
            of_gaussian(rate, 1.0), abs=1e-4
        )


# ------------------------------------------------------------------------------------- the formula


def test_both_inequalities_count() -> None:
    """Each alone is off: of a pure ε the first one at small rates, the second one at large ones."""
    epsilon = math.log(3)
    curve = np.array([epsilon]), np.array([0.0])
    assert true_positive_rate(*curve, 0.1) == pytest.approx(0.3)
    assert true_positive_rate(*curve, 0.7) == pytest.approx(0.9)
    assert true_positive_rate(*curve, 0.25) == pytest.approx(0.75)


def test_delta_is_added() -> None:
    curve = np.array([0.0, 1.0]), np.array([0.2, 0.05])
    assert true_positive_rate(*curve, 0.01) == pytest.approx(math.e * 0.01 + 0.05)
    assert true_positive_rate(*curve, 0.5) == pytest.approx(0.7)
    assert true_positive_rate(*curve, 0.9) == pytest.approx(1 - (1 - 0.9 - 0.05) / math.e)


@pytest.mark.parametrize("rate", [1e-9, 0.3, 1 - 1e-9])
def test_never_above_one_and_never_below_the_false_positives(rate: float) -> None:
    for delta in (0.0, 1e-12, 0.3, 1.0, 5.0, math.inf):
        assert rate <= true_positive_rate(EPSILONS, np.full(EPSILONS.shape, delta), rate) <= 1


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, math.nan])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="Expected 0 < false_positive_rate < 1, got"):
        plan(whole_batch(), 1.0).attack_power(rate)


# ----------------------------------------------------------------------------------------- the plan


@pytest.mark.slow
def test_more_noise_and_fewer_steps_leave_less() -> None:
    sampling = PoissonSampling(2000, 50, 40)
    by_noise = [plan(sampling, sigma).attack_power(0.01) for sigma in (0.5, 0.7, 1.0, 2.0, 8.0)]
    assert by_noise == sorted(by_noise, reverse=True) and len(set(by_noise)) == 5
    by_steps = [plan(sampling, 0.7).attack_power(0.01, steps) for steps in (0, 1, 5, 20, 40)]
    assert by_steps == sorted(by_steps) and len(set(by_steps)) == 5
    assert plan(sampling, 0.7).attack_power(0.01) == by_steps[-1]
    assert by_steps[0] == pytest.approx(0.01, rel=1e-12)  # nothing is out yet


def test_passes_of_a_stream_count() -> None:
    given = plan(StreamSampling(1000, 100, passes=2), 2.0)
    found = [given.attack_power(0.01, steps) for steps in (1, 10, 11, 20)]
    assert found[0] == found[1] < found[2] == found[3]


def test_releases_count_from_the_start() -> None:
    histogram = Release("histogram", dp_accounting.GaussianDpEvent(3.0))
    given = plan(StreamSampling(1000, 100), 4.0, 1e-5, histogram)
    assert 0 <= given.attack_power(0.01, 0) - of_gaussian(0.01, 3.0) <= 1e-3
    both = (4.0**-2 + 3.0**-2) ** -0.5
    assert 0 <= given.attack_power(0.01) - of_gaussian(0.01, both) <= 1e-3


@pytest.mark.slow
def test_failures_are_inside() -> None:
    """What the tails and the overflows of the capacity add to δ, an attacker has as well."""
    roomy, tight = (PoissonSampling(2000, 50, 40, capacity) for capacity in (120, 78))
    added = tight.overflow_delta(0.0, 40)
    assert added > 1e-3
    found = [plan(sampling, 1.0).attack_power(1e-3) for sampling in (roomy, tight)]
    assert found[0] + added < found[1]
    short = plan(StreamSampling(1000, 1000), 0.1279)  # noise that ends 8.2 deviations out
    assert short.cost(0.1279, 1).failure_delta(1.0) > 0.3
    assert short.attack_power(1e-12) >= 0.3


def test_what_epsilon_cannot_say_may_still_be_said() -> None:
    """ε is infinite where failures exceed the budget's δ, however few they are."""
    given = plan(StreamSampling(1000, 100), 0.4, 1e-12)
    with pytest.raises(ValueError, match="at some epsilon"):
        given.spent(10)
    assert 0 <= given.attack_power(0.01) - of_gaussian(0.01, 0.4) <= 1e-3


@pytest.mark.parametrize(
    "event", [dp_accounting.NonPrivateDpEvent(), dp_accounting.GaussianDpEvent(0.0)]
)
def test_without_noise_everything_can_be_told(event: dp_accounting.DpEvent) -> None:
    """ε is infinite."""
    given = plan(StreamSampling(1000, 100), 1.0, 1e-5, Release("counts", event))
    assert given.attack_power(1e-3) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_losses_that_no_float_holds_are_told_for_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "FINE", 1e-2)  # losses up to 1,500, of which e to the power is 1e651
    assert plan(StreamSampling(1000, 100), 0.02).attack_power(1e-3) == 1


def test_a_plan_without_noise_or_with_too_many_steps_is_refused() -> None:
    given = plan(PoissonSampling(2000, 50, 40), 1.0)
    with pytest.raises(ValueError, match="0 <= steps <= 40, got steps=41"):
        given.attack_power(0.01, 41)
    with pytest.raises(ValueError, match="Expected a calibrated plan"):
        dataclasses.replace(given, noise_multiplier=None).attack_power(0.01)


def test_a_statement_composes_a_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    composed, calls = accountant.composed, []

    def counted(losses: object) -> object:
        calls.append(losses)
        return composed(losses)  # type: ignore[arg-type]

    monkeypatch.setattr(accountant, "composed", counted)
    accountant.accountant_of.cache_clear()
    given = plan(PoissonSampling(2000, 50, 20_000), 30.123, 1e-5)
    given.statement()
    assert len(calls) == 1
    given.attack_power(0.3)
    assert len(calls) == 1
