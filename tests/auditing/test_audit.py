"""Audits of the package's own mechanisms: strong enough to mean something, and never above ε."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import Audit, GradientCanaries, InputCanaries, PrivacyBudget, PrivacyPlan
from dp_sparse.auditing import CanaryScores, GaussianTradeOff, repeated_runs_bound
from dp_sparse.auditing.audit import AuditResult, Bound
from dp_sparse.auditing.canaries import Canaries, Placement
from dp_sparse.sampling import NotPrivateSampling
from tests.auditing.audited import (
    DELTA,
    EXAMPLES,
    IDS,
    LABELS,
    MECHANISMS,
    adafest,
    audit_of,
    bounds_in_parts,
    dpsgd,
    fest,
    model,
    sound,
    stream_plan,
)

POISSON = dp_sparse.PoissonSampling(EXAMPLES, EXAMPLES / 4, steps=12)
JOINT = 1 - (1 - 0.999) / 20  # of each of 20 runs


def test_a_white_box_canary_recovers_80_percent_of_epsilon_4() -> None:
    result = audit_of("dpsgd", stream_plan(4.0, 512), 25_000, confidence=0.999).run()
    assert 0.8 * 4.0 < result.bound <= 4.0 and not result.exceeds
    assert len(result.bounds) == 3 and result.claim == pytest.approx(4.0, abs=1e-3)


@pytest.mark.parametrize(
    "name", ["adafest", "lazy", "shuffled", pytest.param("fest", marks=pytest.mark.slow)]
)
def test_no_audit_of_ours_is_above_the_claim(name: str) -> None:
    """Of AdaFEST the map's survivors are part of what the attacker sees."""
    assert 0.5 < sound(name) < 4.0


def test_poisson_sampling_is_audited_over_all_steps() -> None:
    plan = PrivacyPlan(PrivacyBudget(4.0, DELTA), POISSON).calibrate()
    result = audit_of("dpsgd", plan, 1500).run()
    assert 0.1 < result.bound < 4.0 and not result.exceeds


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("sampling", ["stream", "poisson"])
def test_none_of_20_audits_is_above_the_claim(name: str, sampling: str) -> None:
    """At 99.9 % joint confidence."""
    plan = stream_plan(4.0)
    if sampling == "poisson":
        plan = PrivacyPlan(plan.budget, POISSON).calibrate()
    bounds = [audit_of(name, plan, confidence=JOINT).run().bound for _ in range(20)]
    print(name, sampling, sorted(round(bound, 2) for bound in bounds))
    assert 0 < max(bounds) <= 4.0


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("sampling", ["stream", "poisson"])
def test_none_of_20_parts_of_a_run_is_above_the_claim(name: str, sampling: str) -> None:
    """At 99.9 % joint confidence."""
    plan, count = stream_plan(4.0), 2000
    if sampling == "poisson":
        plan, count = PrivacyPlan(plan.budget, POISSON).calibrate(), 400
    audit = audit_of(name, plan, 21 * count, confidence=JOINT)
    bounds = bounds_in_parts(audit, 21)
    print(name, sampling, sorted(round(bound, 2) for bound in bounds))
    assert max(bounds) <= 4.0 and (sampling == "poisson" or max(bounds) > 1.0)


def test_input_canaries_are_examples_with_wrong_labels() -> None:
    """Each has a feature of its own, and is learned by heart."""
    rng = np.random.default_rng(1)
    labels = (rng.integers(0, 2, (200, 1)) * 20 - 10).astype(np.float32)
    canaries = InputCanaries(np.eye(200, dtype=np.float32), labels)
    dense = functools.partial(keras.layers.Dense, 1, use_bias=False, kernel_initializer="zeros")
    linear = lambda: keras.Sequential([keras.Input((200,)), dense()])  # noqa: E731
    sampling = dp_sparse.StreamSampling(8, 208, passes=20)
    plan = PrivacyPlan(PrivacyBudget(1.0, DELTA), sampling).with_noise(1.0)
    examples = np.zeros((8, 200), np.float32), np.zeros((8, 1), np.float32)
    make = lambda plan: dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(50.0), plan, 1.0)  # noqa: E731
    result = Audit(linear, examples, "mse", plan, make, canaries).run()
    assert len(result.bounds) == 2 and 1.5 < result.bound < plan.budget.epsilon


class Silent(Canaries):
    """Canaries of which nothing is learned, and for which nothing is trained."""

    independent, number = False, 4

    def attacked(self, trained: Any, placement: Any, plan: PrivacyPlan) -> Any:
        assert plan.sampling.num_examples == EXAMPLES + 4 and plan.plan_id
        return {"silence": CanaryScores([0.0, 1.0], [0.0, 1.0])}


def test_each_run_is_charged_before_it_begins(tmp_path: Path) -> None:
    account = dp_sparse.BudgetAccount(tmp_path / "budget.json", PrivacyBudget(2.5, 1e-4))
    audit = audit_of("dpsgd", stream_plan(1.0), canaries=Silent(), account=account)
    result = audit.run()
    assert [charge.note for charge in account.charges] == ["audit: thresholds", "audit: judged"]
    assert len({charge.run_id for charge in account.charges}) == 2
    assert result.spent == pytest.approx((2.0, 2 * DELTA), rel=1e-3) and result.bound == 0
    with pytest.raises(dp_sparse.PrivacyError, match="Expected a plan within what is left"):
        audit.run()


class Scripted(Canaries):
    """Runs whose scores are known: so far apart are those in the data from the others."""

    independent, number = True, 400

    def __init__(self, *apart: float) -> None:
        self._apart = list(apart)

    def attacked(self, trained: Any, placement: Any, plan: PrivacyPlan) -> Any:
        mean, rng = self._apart.pop(0), np.random.default_rng(len(self._apart))
        return {"script": CanaryScores(rng.normal(mean, 1, 200), rng.normal(size=200))}


def scripted(monkeypatch: pytest.MonkeyPatch, *apart: float, **fields: Any) -> AuditResult:
    """An audit of one step, whose trade-off is a Gaussian one."""
    gaussian = lambda plan: GaussianTradeOff(plan.noise_multiplier, plan.budget.delta)  # noqa: E731
    monkeypatch.setattr("dp_sparse.auditing.audit.PlanTradeOff", gaussian)
    return audit_of("dpsgd", stream_plan(4.0), canaries=Scripted(*apart), **fields).run()


def test_thresholds_come_from_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are other ones if its scores are, though those that are judged are the same."""
    near, far = scripted(monkeypatch, 1.0, 4.0), scripted(monkeypatch, 8.0, 4.0)
    assert near.scores.held_in.tolist() == far.scores.held_in.tolist()
    for one, other in zip(near.bounds, far.bounds, strict=True):
        assert one.threshold != other.threshold


def test_all_bounds_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three fails a third as often as all may."""
    result = scripted(monkeypatch, 2.0, 2.0, confidence=0.97)
    (bound,) = (b for b in result.bounds if b.estimator.endswith("independent"))
    sigma = result.plan.noise_multiplier
    assert sigma is not None
    claim = GaussianTradeOff(sigma, DELTA)
    alone = repeated_runs_bound(result.scores, bound.threshold, claim, 0.99)
    assert bound.epsilon == alone > 0


def test_what_comes_back_has_no_weights() -> None:
    assert {field.name for field in dataclasses.fields(AuditResult)} == {
        "plan", "bounds", "confidence", "scores", "spent",
    }  # fmt: skip


def test_the_result_in_words_and_as_a_picture(tmp_path: Path) -> None:
    plan, scores = stream_plan(1.0), CanaryScores([3.0, 1.0, 2.0], [0.0, 2.5])
    bound = Bound(1.5, "an estimator", "loss", 2.0)
    result = AuditResult(
        plan, (bound, Bound(0.5, "another", "updates", 1.0)), 0.999, scores, (2.0, 2e-5)
    )
    assert result.exceeds and str(result).splitlines() == [
        "Claimed epsilon=1 at delta=1e-05.",
        "5 canaries, 3 of them in the data; all bounds together hold at 99.9000% confidence.",
        "At least epsilon=1.5: an estimator (by loss).",
        "At least epsilon=0.5: another (by updates).",
        "The claim is wrong: attacks show more than it allows.",
        "The runs of this audit spent epsilon=2, delta=2e-05 on the examples, beside every other "
        "run.",
    ]
    below = dataclasses.replace(result, bounds=(Bound(0.5, "another", "updates", 1.0),))
    assert not below.exceeds and "That proves no privacy." in str(below)
    rates = dict(zip(*(each.tolist() for each in result._seen()), strict=True))
    assert rates[0.0] == pytest.approx(1 / 3) and rates[0.5] == rates[1.0] == 1.0
    assert all(rate <= rates[rate] <= 1 / 3 + rate * 4 / 3 + 1e-12 for rate in rates if rate < 0.5)
    result.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def two_outputs() -> keras.Model:
    inputs = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(40, 3)(inputs))
    return keras.Model(inputs, [keras.layers.Dense(1)(rows), keras.layers.Dense(1)(rows)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"confidence": 1.0}, "Expected 0 < confidence < 1"),
        ({"canaries": 100}, "Expected canaries=GradientCanaries"),
        ({"model": "model"}, "Expected model to be a function that makes one, got model='model'"),
        ({"optimizer": "sgd"}, "Expected optimizer to be a function"),
        ({"examples": IDS}, "Expected examples="),
        ({"examples": (IDS[:3], LABELS[:3])}, "Expected num_examples=64 examples, .* got 3"),
        ({"plan": None}, "Expected a calibrated plan, got plan=None"),
        (
            {"plan": dp_sparse.not_private_plan(stream_plan(1.0), 1)},
            "Expected a plan that guarantees something",
        ),
        ({"model": two_outputs}, "Expected a model of one output, got .* with 2"),
        ({"canaries": InputCanaries(IDS[:1], LABELS[:1])}, "Expected 2 canaries or more, got 1"),
    ],
)
def test_bad_input(fields: dict[str, Any], message: str) -> None:
    given = {
        "model": model, "examples": (IDS, LABELS), "loss": "mse", "plan": stream_plan(1.0),
        "optimizer": dpsgd, "canaries": GradientCanaries(10), **fields,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        Audit(**given).run()


def test_canaries_are_counted() -> None:
    with pytest.raises(ValueError, match="Expected count to be a whole number > 0, got count=0"):
        GradientCanaries(0)


def test_only_samplers_with_a_twin_for_more_examples_are_audited() -> None:
    plan = stream_plan(1.0)
    other = NotPrivateSampling(plan.sampling, 1)
    with pytest.raises(ValueError, match="Expected a plan with PoissonSampling or StreamSampling"):
        Placement.of(other, 3)


def test_rows_of_the_probe_belong_to_adafest_over_all_rows() -> None:
    """FEST's rows were selected before the probe was there: its canaries act on a dense weight."""
    canaries = GradientCanaries(10)
    plan = stream_plan(1.0)
    assert canaries._acts_on_rows(adafest(plan)) and not canaries._acts_on_rows(fest(plan))
    assert GradientCanaries(10, rows=True)._acts_on_rows(dpsgd(plan))
