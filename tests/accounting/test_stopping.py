"""Rules that stop a run where its releases look worst for an example, on exact Gaussian walks.

The privacy loss of T Gaussian steps is a random walk. The δ that a rule needs at the ε of the step
where it stops, E[(1 − e^(ε − loss))⁺], is largest for the rule that dynamic programming finds.
"""

import dataclasses
import json
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
from scipy import stats

import dp_sparse
from dp_sparse.accounting.budget import epsilon_at_any_time, lengths
from dp_sparse.core import PrivacyError
from tests.statements import sentences

STEPS, DELTA = 64, 1e-5
MU = 0.0315  # of a step: its sensitivity over its deviation; ε of all steps is about 1


def epsilon_of(steps: int, delta: float) -> float:
    """That of `steps` steps, by the closed form."""
    return float(dp_accounting.get_epsilon_gaussian(1 / (MU * math.sqrt(steps)), delta))


def needed_delta(epsilon: Callable[[int], float]) -> float:
    """δ at `epsilon(τ)` of the worst rule, by dynamic programming over the loss so far."""
    width = MU / 12
    losses = np.arange(-12 * MU * math.sqrt(STEPS), 16 * MU * math.sqrt(STEPS), width)
    reach = 120
    moves = stats.norm.pdf(np.arange(-reach, reach + 1) * width, MU**2 / 2, MU)
    moves /= moves.sum()
    value = np.zeros_like(losses)
    for step in range(STEPS, 0, -1):
        stopped = np.maximum(-np.expm1(epsilon(step) - losses), 0)
        value = np.maximum(stopped, value)
        value = np.convolve(np.pad(value, reach, mode="edge"), moves[::-1], mode="valid")
    return float(np.interp(0, losses, value))


def any_time(steps: int) -> float:
    return epsilon_at_any_time(
        lambda length, budget: epsilon_of(length, budget.delta),
        dp_sparse.PrivacyBudget(1.0, DELTA),
        STEPS,
        steps,
    )


def test_the_walk_needs_the_delta_of_its_length_where_the_length_is_fixed() -> None:
    """The dynamic program against the closed form: never before the last step."""
    assert needed_delta(lambda step: epsilon_of(STEPS, DELTA)) == pytest.approx(DELTA, rel=1e-3)


def test_epsilon_of_the_step_where_a_rule_stops_needs_many_times_delta() -> None:
    assert 8 < needed_delta(lambda step: epsilon_of(step, DELTA)) / DELTA < 9


def test_epsilon_at_any_time_holds_for_the_worst_rule() -> None:
    needed = needed_delta(any_time)
    assert 0.8 * DELTA < needed <= DELTA


def test_what_it_costs() -> None:
    """A few percent of ε for all steps, and less for fewer steps."""
    epsilons = [any_time(steps) for steps in (0, 1, 8, 9, 16, 32, 33, 64)]
    assert epsilons == sorted(epsilons)
    assert 1.02 < epsilons[-1] / epsilon_of(STEPS, DELTA) < 1.06
    assert epsilons[2] < 0.45 * epsilons[-1]


@pytest.mark.parametrize("steps", [1, 2, 7, 391, 20_000])
def test_shares_of_delta_are_at_most_delta(steps: int) -> None:
    found = lengths(steps, DELTA)
    assert found[0] == (steps, DELTA / 2)
    assert [length for length, _ in found] == sorted({length for length, _ in found}, reverse=True)
    assert DELTA / 2 <= sum(share for _, share in found) <= DELTA


# ------------------------------------------------------------------------------------------- plans


def plan(stopping: str, **fields: object) -> dp_sparse.PrivacyPlan:
    sampling = dp_sparse.PoissonSampling(2000, expected_batch_size=50, steps=40)
    budget = dp_sparse.PrivacyBudget(2.0, 1e-5)
    return dp_sparse.PrivacyPlan(budget, sampling, stopping=stopping, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fixed() -> dp_sparse.PrivacyPlan:
    return plan("fixed").calibrate()


@pytest.fixture(scope="module")
def at_any_time() -> dp_sparse.PrivacyPlan:
    return plan("any time").calibrate()


def test_a_shorter_run_is_guaranteed_what_all_steps_cost(fixed: dp_sparse.PrivacyPlan) -> None:
    whole = fixed.spent(40)
    assert fixed.spent(10).epsilon < whole.epsilon
    assert fixed.guaranteed(10) == fixed.guaranteed(40) == whole
    assert fixed.guaranteed(0) == fixed.spent(0)  # nothing was released


def test_releases_may_decide_that_no_step_is_taken() -> None:
    release = dp_sparse.Release("histogram", dp_accounting.GaussianDpEvent(8.0))
    paid = plan("fixed", releases=(release,), noise_multiplier=1.0)
    assert paid.guaranteed(0) == paid.spent(40)


def test_a_plan_for_any_time_meets_its_budget(
    fixed: dp_sparse.PrivacyPlan, at_any_time: dp_sparse.PrivacyPlan
) -> None:
    assert fixed.noise_multiplier is not None and at_any_time.noise_multiplier is not None
    assert 1.01 < at_any_time.noise_multiplier / fixed.noise_multiplier < 1.05
    spent = [at_any_time.spent(steps).epsilon for steps in (0, 1, 10, 11, 40)]
    assert spent == sorted(spent) and 1.99 < spent[-1] <= 2
    assert at_any_time.guaranteed(10) == at_any_time.spent(10)
    assert at_any_time.spent(10).delta == 1e-5
    share = dataclasses.replace(at_any_time.budget, delta=1e-5 / 8)  # of T / 4 = 10 steps
    short = at_any_time.cost(at_any_time.noise_multiplier, 10).epsilon(share)
    assert at_any_time.spent(10).epsilon == short


def test_a_test_that_waits_has_the_power_of_all_steps(
    fixed: dp_sparse.PrivacyPlan, at_any_time: dp_sparse.PrivacyPlan
) -> None:
    assert at_any_time.attack_power(0.01, steps=10) == at_any_time.attack_power(0.01)
    assert fixed.attack_power(0.01, steps=10) < fixed.attack_power(0.01)


def test_statement_of_a_run_that_is_shorter_than_its_plan(fixed: dp_sparse.PrivacyPlan) -> None:
    promise, if_fixed, *others = sentences(fixed.statement(10))
    whole = sentences(fixed.statement(40))
    assert promise == whole[0].replace("after 40", "after 10")
    assert "if the number of steps was chosen without looking at the run" in if_fixed
    epsilon = float(if_fixed[len("It is (") : if_fixed.index(",")])
    assert fixed.spent(10).epsilon <= epsilon <= 1.001 * fixed.spent(10).epsilon
    assert others == whole[1:]  # tests have the power that all steps give them
    assert len(if_fixed) <= 115 and len(whole) <= 17


def test_statement_of_a_plan_for_any_time(at_any_time: dp_sparse.PrivacyPlan) -> None:
    for steps in (None, 10, 40):
        promise, rule, *_ = sentences(at_any_time.statement(steps))
        spent = at_any_time.spent(40 if steps is None else steps).epsilon
        assert spent <= float(promise[1 : promise.index(",")]) <= 1.001 * spent
        assert "This holds whatever rule stops the run" in rule and len(rule) <= 115
        assert "without looking" not in rule


def test_a_statement_without_steps_says_of_none_that_it_was_taken(
    fixed: dp_sparse.PrivacyPlan,
) -> None:
    promise = sentences(fixed.statement())[0]
    assert "protects one example over at most 40 steps" in promise
    assert "after" not in promise


def test_an_account_charges_a_shorter_run_whole(
    tmp_path: object, fixed: dp_sparse.PrivacyPlan, at_any_time: dp_sparse.PrivacyPlan
) -> None:
    account = dp_sparse.BudgetAccount(
        f"{tmp_path}/account.json", dp_sparse.PrivacyBudget(5.0, 2.5e-5)
    )
    for each in (fixed, at_any_time):
        account.charge(each)
    assert [charge.epsilon for charge in account.charges] == [2.0, 2.0]
    with pytest.raises(PrivacyError, match="within what is left"):
        account.charge(fixed.calibrate())


def test_configuration(at_any_time: dp_sparse.PrivacyPlan) -> None:
    saved = json.loads(json.dumps(at_any_time.get_config()))
    again = dp_sparse.PrivacyPlan.from_config(saved)
    assert again == at_any_time and again.fingerprint == at_any_time.fingerprint
    other = dataclasses.replace(at_any_time, stopping="fixed")
    assert other.fingerprint != at_any_time.fingerprint
    assert "stopping" not in other.get_config()  # as plans were saved before there was one
    assert dp_sparse.PrivacyPlan.from_config(other.get_config()) == other


def test_another_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stopping in \('fixed', 'any time'\), got stopping='x'"):
        plan("x")


@pytest.mark.slow
def test_what_a_plan_for_any_time_pays_for_a_selection() -> None:
    """The noise of both is for the share of δ that all steps have."""
    sampling = dp_sparse.StreamSampling(10_000, 100)
    budget = dp_sparse.PrivacyBudget(1.0, 1e-5)
    tables = {"words": dp_sparse.TopKTable(500, max_lookups=5)}
    of_any, of_half = (
        dp_sparse.calibrate_top_k(given, tables, k=20, share=0.2).source
        for given in (
            dp_sparse.PrivacyPlan(budget, sampling, stopping="any time"),
            dp_sparse.PrivacyPlan(dataclasses.replace(budget, delta=5e-6), sampling),
        )
    )
    assert of_any == of_half
