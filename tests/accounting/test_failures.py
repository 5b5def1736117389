"""ε beside failures whose δ grows with ε, whatever the budget's ε is."""

import math

import dp_accounting
import pytest

from dp_sparse.accounting import PrivacyBudget, PrivacyPlan, run_cost
from dp_sparse.accounting.accountant import epsilon_of
from dp_sparse.accounting.calibration import FINE
from dp_sparse.accounting.run_cost import epsilon_beside_failures
from dp_sparse.sampling import PoissonSampling

SAMPLING = PoissonSampling(10_000, 500, epochs=1, capacity=659)  # for epsilon = 8
EVENT = dp_accounting.GaussianDpEvent(2.0)


def test_what_was_spent_does_not_rest_on_a_large_budget() -> None:
    """At the budget's ε = 20 batches beyond the capacity alone would exceed δ."""
    spent = [
        PrivacyPlan(PrivacyBudget(epsilon, 1e-5), SAMPLING, noise_multiplier=1.0).spent(20).epsilon
        for epsilon in (3.0, 20.0, 600.0)
    ]
    assert SAMPLING.overflow_delta(20.0, 20) > 1e-5
    assert 1 < spent[1] == spent[2] <= spent[0] < spent[1] + 1e-3


@pytest.mark.parametrize("scale", [1e-9, 1e-7, 5e-7])
def test_the_answer_is_on_the_safe_side_and_the_smallest(scale: float) -> None:
    failures = lambda epsilon: scale * math.exp(epsilon)  # noqa: E731
    found = epsilon_beside_failures(EVENT, PrivacyBudget(1.0, 1e-5), failures, FINE)

    def needed(epsilon: float) -> float:
        return epsilon_of(EVENT, 1e-5 - failures(epsilon), FINE)

    assert needed(found) <= found
    assert needed(found * (1 - 1e-3)) > found * (1 - 1e-3)


def test_few_evaluations_where_the_budget_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """ε is looked up in one curve, and not evaluated again and again until failures agree."""
    asked: list[float] = []

    def counted(event: dp_accounting.DpEvent, delta: float, interval: float) -> float:
        asked.append(delta)
        return epsilon_of(event, delta, interval)

    monkeypatch.setattr(run_cost, "epsilon_of", counted)
    spent = PrivacyPlan(PrivacyBudget(20.0, 1e-5), SAMPLING, noise_multiplier=0.5).spent(20)
    assert 5 < spent.epsilon < 20 and len(asked) <= 2


def test_the_default_capacity_leaves_room_for_a_large_epsilon() -> None:
    sampling = PoissonSampling(10_000, 500, epochs=1)
    assert sampling.overflow_delta(20.0, sampling.steps) <= 1e-3 / 10_000
    assert sampling.batch_capacity < 1.06 * SAMPLING.batch_capacity


def test_failures_that_leave_nothing() -> None:
    for scale in (1e-5, 9e-6):
        failures = lambda epsilon, scale=scale: scale * math.exp(epsilon)  # noqa: E731
        found = epsilon_beside_failures(EVENT, PrivacyBudget(1.0, 1e-5), failures, FINE)
        assert found == math.inf


@pytest.mark.slow
def test_a_large_budget_can_be_calibrated() -> None:
    with pytest.warns(UserWarning, match="so the plan gets the noise of a smaller epsilon"):
        plan = PrivacyPlan(PrivacyBudget(20.0, 1e-5), SAMPLING).calibrate()
    assert 8 < plan.spent(SAMPLING.steps).epsilon <= 20
    assert (
        plan.noise_multiplier
        < PrivacyPlan(PrivacyBudget(8.0, 1e-5), SAMPLING).calibrate().noise_multiplier
    )
