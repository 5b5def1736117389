"""A plan by Theorem 6 is taken on request alone, and whatever speaks of it says what is true."""

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import PoissonSampling, PrivacyBudget, PrivacyPlan, ShuffledDPSGDOptimizer
from dp_sparse.auditing import CanaryScores
from dp_sparse.auditing.audit import AuditResult, Bound
from dp_sparse.shuffling import heuristic
from tests.statements import sentences
from tests.training_cases import plan_for

CLIP, RATIO = 1.0, 250**0.5
BUDGET = PrivacyBudget(0.25, 5e-6)
CLAIM = (
    'Theorem 6 of "Shuffled DP-SGD" claims epsilon=0.25, which is not guaranteed; epsilon=4.902 is.'
)


def claimed_plan(passes: int = 1) -> PrivacyPlan:
    sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=8, passes=passes)
    plan = PrivacyPlan(BUDGET, sampling)
    return dp_sparse.theorem6_plan_not_a_guarantee(plan, 85.8e6, CLIP, RATIO)


def optimizer(plan: PrivacyPlan, **arguments: Any) -> ShuffledDPSGDOptimizer:
    given = {"heuristic": True, "batch_clip_norm": RATIO, **arguments}
    return ShuffledDPSGDOptimizer("sgd", plan, CLIP, **given)


def test_the_plan_guarantees_what_dp_sgd_does_at_this_noise() -> None:
    plan = claimed_plan()
    assert plan.noise_multiplier == pytest.approx(0.935, abs=1e-3)
    plain = PrivacyPlan(BUDGET, plan.sampling.for_plan(None)).with_noise(plan.noise_multiplier)
    assert plan.budget == plain.budget and plan.budget.epsilon > 4.8
    assert plan.statement().splitlines()[0] == CLAIM
    assert plan.statement().splitlines()[1:] == plain.statement().splitlines()
    assert len(sentences(plan.statement())) <= 18
    again = PrivacyPlan.from_config(json.loads(json.dumps(plan.get_config())))
    assert again == plan and again.statement().splitlines()[0] == CLAIM
    assert plan.fingerprint != plain.fingerprint


@pytest.mark.parametrize(("epsilon", "steps"), [(1.0, 1), (1.0, 400), (8.0, 400)])
def test_steps_are_composed_and_amplified_as_in_the_paper(epsilon: float, steps: int) -> None:
    """Its Theorems 2 and 1, forwards from each step's (ε, δ), give the plan's budget again."""
    delta, q = 1e-5, 0.02
    sampling = PoissonSampling(num_examples=1000, expected_batch_size=1000 * q, steps=steps)
    plan = PrivacyPlan(PrivacyBudget(epsilon, delta), sampling)
    basic, advanced = heuristic._budgets_of_a_step(plan)
    sampled = [(math.log(1 + q * (math.exp(e) - 1)), q * d) for e, d in (basic, advanced)]
    assert steps * sampled[0][0] == pytest.approx(epsilon)
    of_step, its_delta = sampled[1]
    slack = delta - steps * its_delta
    assert slack == pytest.approx(delta / 2, rel=1e-6)
    composed = steps * of_step**2 / 2 + math.sqrt(2 * math.log(1 / slack) * steps * of_step**2)
    assert composed == pytest.approx(epsilon)
    assert (advanced[0] > basic[0]) == (steps == 400)


def test_less_noise_is_claimed_than_dp_sgd_needs_over_many_steps() -> None:
    sampling = PoissonSampling(num_examples=50_000, expected_batch_size=1000, steps=500)
    plan = PrivacyPlan(PrivacyBudget(1.0, 5e-6), sampling)
    claimed = dp_sparse.theorem6_plan_not_a_guarantee(plan, 85.8e6, CLIP, RATIO)
    assert claimed.noise_multiplier < plan.rough_noise()[0] and claimed.budget.epsilon > 1.0


def test_it_must_be_asked_for() -> None:
    plan = claimed_plan()
    with pytest.raises(ValueError, match=r"Expected heuristic=True .* got heuristic=False. Theor"):
        optimizer(plan, heuristic=False)
    with pytest.raises(ValueError, match="Expected a plan with mechanism=GaussianMechanism"):
        dp_sparse.DPSGDOptimizer("sgd", plan, CLIP)
    with pytest.raises(ValueError, match="Expected a plan of theorem6_plan_not_a_guarantee with"):
        optimizer(plan_for(8))
    for norm in (None, 2 * RATIO):
        with pytest.raises(ValueError, match="Expected batch_clip_norm=15.8114, for which"):
            optimizer(plan, batch_clip_norm=norm)
    with pytest.warns(UserWarning, match="which is not guaranteed; epsilon=4.902 is"):
        made = optimizer(plan)
    with pytest.warns(UserWarning, match="not guaranteed"):
        again = ShuffledDPSGDOptimizer.from_config(made.get_config())
    assert again.heuristic and again.plan == plan
    assert not ShuffledDPSGDOptimizer("sgd", plan_for(8), CLIP).get_config()["heuristic"]


@pytest.mark.filterwarnings("ignore:Theorem 6")
def test_reports_and_logs_have_both(tmp_path: Path) -> None:
    plan = claimed_plan(passes=2)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer(plan), "mse")
    report = dp_sparse.PrivacyReport(str(tmp_path / "report.html"))
    monitor = dp_sparse.PrivacyMonitor(str(tmp_path / "log"), every_steps=1)
    shown: list[dict[str, Any]] = []
    keep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: shown.append(logs))
    batches = plan.sampling.batches((np.ones((8, 3)), np.ones(8)))
    model.fit(batches, epochs=2, verbose=0, callbacks=[report, monitor, keep])
    true = plan.budget.epsilon
    assert shown[-1]["epsilon"] == pytest.approx(true, rel=1e-4) and true > 4
    assert shown[-1]["epsilon_not_guaranteed"] == 0.25
    assert "epsilon=0.25, which is not guaranteed" in (tmp_path / "report.html").read_text()
    lines = (tmp_path / "log" / "log.jsonl").read_text().splitlines()
    assert len(lines) == 2
    for line in map(json.loads, lines):
        assert line["epsilon_not_guaranteed"] == 0.25 < line["epsilon"]


def test_an_audit_says_so_too() -> None:
    bound, scores = Bound(3.0, "an estimator", "loss", 2.0), CanaryScores([1.0], [0.0])
    result = AuditResult(claimed_plan(), (bound,), 0.999, scores, (9.8, 1e-5))
    assert str(result).splitlines()[:2] == [CLAIM, "Claimed epsilon=4.901 at delta=5e-06."]
    assert not result.exceeds


def test_other_plans_are_refused() -> None:
    release = dp_sparse.Release("x", dp_accounting.GaussianDpEvent(300.0))
    plan = PrivacyPlan(BUDGET, dp_sparse.StreamSampling(8, 8), releases=(release,))
    with pytest.raises(ValueError, match="Expected a plan without releases"):
        dp_sparse.theorem6_plan_not_a_guarantee(plan, 1e6, CLIP, RATIO)
    other = dp_sparse.not_private_plan(plan_for(8, noise_multiplier=1.0), 1)
    with pytest.raises(ValueError, match="Expected a plan with PoissonSampling or StreamSampling"):
        dp_sparse.theorem6_plan_not_a_guarantee(other, 1e6, CLIP, RATIO)
