"""Plans on disjoint parts: the largest epsilon, one delta, and what is refused."""

import dataclasses

import dp_accounting
import pytest

import dp_sparse


def plan(steps: int = 10, delta: float = 1e-4, examples: int = 1000) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(50.0, delta),
        dp_sparse.PoissonSampling(examples, 100, steps),
        noise_multiplier=1.0,
    )


PLANS = {"day 1": plan(10), "day 2": plan(40), "day 3": plan(20)}


def test_the_largest_counts_and_not_the_sum() -> None:
    found = dp_sparse.DisjointPlans(PLANS).spent()
    assert found == max(
        (p.spent(p.sampling.steps) for p in PLANS.values()), key=lambda b: b.epsilon
    )
    assert found == PLANS["day 2"].spent(40)


def test_parts_that_have_not_begun_cost_nothing() -> None:
    plans = dp_sparse.DisjointPlans(PLANS)
    assert plans.spent({"day 1": 10, "day 2": 1}) == PLANS["day 1"].spent(10)
    assert plans.spent({}).epsilon < 1e-9
    assert "nothing is spent" in plans.statement({})


def test_a_release_costs_before_the_first_step() -> None:
    release = dp_sparse.Release("histogram", dp_accounting.GaussianDpEvent(2.0))
    paid = dataclasses.replace(plan(), releases=(release,))
    assert dp_sparse.DisjointPlans({"day 1": paid}).spent({"day 1": 0}).epsilon > 1


def test_the_statement_says_who_pays_what() -> None:
    lines = dp_sparse.DisjointPlans(PLANS).statement().splitlines()
    largest, total = (
        f"{f(p.spent(p.sampling.steps).epsilon for p in PLANS.values()):.2f}"[:-1]
        for f in (max, sum)
    )
    assert lines[0].startswith("Training on 3 disjoint parts") and largest in lines[0]
    assert "that of day 2" in lines[0]
    assert "in two parts" in lines[1]
    assert total in lines[2] and "A person with an example in every part" in lines[2]
    assert lines[4:] == PLANS["day 2"].statement().splitlines()


def test_a_person_in_every_part_pays_every_delta() -> None:
    """By basic composition: the sum of the parts' δ as well as of their ε."""
    plans = {name: plan(steps=5, delta=2e-4) for name in ("a", "b", "c", "d")}
    person = dp_sparse.DisjointPlans(plans).statement().splitlines()[2]
    assert "A person with an example in every part" in person
    assert person.endswith("at delta=0.0008.")
    begun = dp_sparse.DisjointPlans(plans).statement({"a": 5, "c": 5})
    assert "at delta=0.0004." in begun and "at delta=0.0008." not in begun


def test_parts_that_stopped_early_are_guaranteed_what_their_plans_cost() -> None:
    plans, taken = dp_sparse.DisjointPlans(PLANS), {"day 1": 10, "day 2": 1}
    assert plans.spent(taken) == PLANS["day 1"].spent(10)
    assert plans.guaranteed(taken) == PLANS["day 2"].spent(40) == plans.guaranteed()
    assert plans.guaranteed({"day 1": 10, "day 2": 0}) == PLANS["day 1"].spent(10)
    promise, if_fixed, *_ = plans.statement(taken).splitlines()
    assert f"epsilon={PLANS['day 2'].spent(40).epsilon:.2f}"[:-1] in promise
    assert f"epsilon={PLANS['day 1'].spent(10).epsilon:.2f}"[:-1] in if_fixed
    assert "if the numbers of steps were chosen without looking at the runs" in if_fixed
    assert "after 1 of 40 steps" in plans.statement(taken)


def test_parts_that_may_stop_at_any_time() -> None:
    stopped = dataclasses.replace(plan(steps=4), stopping="any time")
    plans, taken = dp_sparse.DisjointPlans({"a": stopped, "b": plan(steps=1)}), {"a": 2, "b": 1}
    assert plans.guaranteed(taken) == plans.spent(taken) == stopped.spent(2)
    assert "without looking" not in plans.statement(taken)


def test_a_plan_without_privacy_says_so() -> None:
    debugging = dp_sparse.not_private_plan(plan(), seed=1).with_noise(1.0)
    plans = dp_sparse.DisjointPlans({"day 1": debugging})
    assert "no privacy" in plans.statement()


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ({}, "a plan for each part of the data, got none"),
        ({"a": plan(), "b": plan(delta=1e-5)}, "one delta for all parts"),
        (
            {"a": dataclasses.replace(plan(), noise_multiplier=None)},
            "a calibrated plan for part 'a'",
        ),
        ({"a": 3}, "a calibrated plan for part 'a'"),
        ({"a": plan().calibrate()} | {"b": None}, "a calibrated plan for part 'b'"),
        (
            {
                "a": plan(),
                "b": dp_sparse.PrivacyPlan(
                    dp_sparse.PrivacyBudget(9.0, 1e-4),
                    dp_sparse.StreamSampling(1000, 100),
                    noise_multiplier=1.0,
                ),
            },
            "one neighbouring relation",
        ),
    ],
)
def test_bad_plans(plans: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dp_sparse.DisjointPlans(plans)


def test_one_plan_does_not_serve_two_parts() -> None:
    same = plan().calibrate()
    with pytest.raises(ValueError, match="plan of its own for each part"):
        dp_sparse.DisjointPlans({"a": same, "b": same})


def test_one_draw_does_not_serve_two_parts() -> None:
    drawn = dp_sparse.OfflinePoissonSampling(1000, 100, 10, draw_id=64 * "a")
    plans = {
        name: dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(9.0, 1e-4), drawn, noise_multiplier=1.0)
        for name in ("a", "b")
    }
    with pytest.raises(ValueError, match="draw of its own for each part"):
        dp_sparse.DisjointPlans(plans)


def test_unknown_parts() -> None:
    with pytest.raises(ValueError, match=r"parts \['day 1', 'day 2', 'day 3'\], got \['day 4'\]"):
        dp_sparse.DisjointPlans(PLANS).spent({"day 4": 1})
