"""Estimators against their plain forms, JAX Privacy, and mechanisms that are known."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse import auditing
from dp_sparse.auditing import (
    CanaryScores,
    EpsilonDeltaTradeOff,
    GaussianTradeOff,
    best_threshold,
    clopper_pearson,
    one_run_bound,
    one_run_fdp_bound,
    repeated_runs_bound,
)
from tests.auditing.scores_by_formula import held_in_and_out
from tests.reference import auditing as reference

JAX_PRIVACY = json.loads(Path(__file__).with_name("jax_privacy.json").read_text())


def guessed(true: int, held_in: int, false: int, held_out: int) -> CanaryScores:
    """So many of them reach the threshold ½."""
    return CanaryScores(np.arange(held_in) < true, np.arange(held_out) < false)


COUNTS = st.integers(0, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@settings(max_examples=40, deadline=None)
@given(COUNTS.filter(lambda pair: pair[1]), st.sampled_from([0.5, 0.9, 0.999, 1 - 1e-6]))
def test_clopper_pearson_is_the_inverse_of_the_binomial_tail(
    counts: tuple[int, int], confidence: float
) -> None:
    low, high = clopper_pearson(*counts, confidence)
    side = (1 - confidence) / 2
    assert high == pytest.approx(reference.upper_end(*counts, side), abs=1e-9)
    assert low == pytest.approx(reference.lower_end(*counts, side), abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 15),
    st.sampled_from([0.0, 1e-4, 1e-2]),
    st.sampled_from([0.9, 0.999]),
)
def test_one_run_bound_is_where_the_p_value_of_the_paper_is_met(
    true: int, false: int, delta: float, confidence: float
) -> None:
    scores = guessed(true, 50, false, 50)
    bound = one_run_bound(scores, 0.5, delta, confidence)
    p_value = functools.partial(reference.one_run_p_value, 100, true + false, true, delta=delta)
    assert p_value(epsilon=bound + 1e-3) > 1 - confidence
    if bound:
        assert p_value(epsilon=max(0.0, bound - 1e-3)) <= 1 - confidence


class ByMu(GaussianTradeOff):
    """Gives μ in place of ε."""

    def epsilon(self, scale: float) -> float:
        return scale / self.noise_multiplier


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 50), st.integers(0, 20), st.sampled_from([0.9, 0.999]))
def test_one_run_fdp_bound_is_where_the_recursion_of_the_paper_stops_rejecting(
    true: int, false: int, confidence: float
) -> None:
    mu = one_run_fdp_bound(guessed(true, 50, false, 50), 0.5, ByMu(1.0, 1e-5), confidence)
    rejects = functools.partial(
        reference.fdp_rejects, 100, true + false, true, significance=1 - confidence
    )
    assert rejects(mu=mu * 0.999) if mu else not rejects(mu=0.01)
    assert mu == 128 or not rejects(mu=max(mu, 0.01) * 1.004)


@pytest.mark.parametrize("mu", [0.05, 1.0, 3.0])
def test_epsilon_of_a_gaussian_trade_off(mu: float) -> None:
    got = GaussianTradeOff(1 / mu, 1e-5).epsilon(1.0)
    assert got == pytest.approx(reference.gaussian_epsilon(mu, 1e-5), rel=1e-6)


OURS: dict[str, Callable[..., float]] = {
    "one_run": lambda scores, at, delta, confidence: one_run_bound(scores, at, delta, confidence),
    "one_run_fdp": lambda scores, at, delta, confidence: one_run_fdp_bound(
        scores, at, GaussianTradeOff(1.0, delta), confidence
    ),
    "clopper_pearson": lambda scores, at, delta, confidence: repeated_runs_bound(
        scores, at, EpsilonDeltaTradeOff(1.0, delta), confidence
    ),
    "gaussian": lambda scores, at, delta, confidence: repeated_runs_bound(
        scores, at, GaussianTradeOff(1.0, delta), confidence
    ),
}


@pytest.mark.parametrize("estimator", OURS)
def test_as_jax_privacy_to_one_percent(estimator: str) -> None:
    """Its numbers, made by `jax_privacy_numbers.py`, on 48 cases."""
    assert len(JAX_PRIVACY) == 48
    for case in JAX_PRIVACY:
        scores = CanaryScores(*held_in_and_out(case["in"], case["out"], case["shift"]))
        confidence = 1 - case["significance"]
        got = OURS[estimator](scores, case["threshold"], case["delta"], confidence)
        assert got == pytest.approx(case[estimator], rel=0.01, abs=1e-3), case


def simulated(mu: float, count: int, rng: np.random.Generator) -> CanaryScores:
    present = rng.random(count) < 0.5
    return CanaryScores.of_coins(rng.normal(mu * present), present)


MEASURES: dict[str, Callable[..., float]] = {
    "repeated": repeated_runs_bound,
    "one_run_fdp": one_run_fdp_bound,
    "one_run": lambda scores, at, claim, confidence: one_run_bound(
        scores, at, claim.delta, confidence
    ),
}


@pytest.mark.parametrize("estimator", MEASURES)
def test_a_bound_is_too_high_no_more_often_than_its_confidence_allows(estimator: str) -> None:
    """400 audits at 80 % of a Gaussian mechanism; with a quarter of its noise the claim falls."""
    claim, rng = GaussianTradeOff(1.0, 1e-3), np.random.default_rng(3)
    bound = functools.partial(MEASURES[estimator], claim=claim, confidence=0.8)
    false_alarms = sum(
        bound(simulated(1.0, 200, rng), 1.0) > claim.epsilon(1.0) for _ in range(400)
    )
    assert false_alarms <= 400 * 0.2 + 4 * math.sqrt(400 * 0.2 * 0.8)
    if estimator != "one_run":  # which sees less than half of ε, whatever the mechanism
        alarms = sum(bound(simulated(4.0, 200, rng), 2.0) > claim.epsilon(1.0) for _ in range(40))
        assert alarms >= 36


def test_one_run_bound_finds_what_is_not_private() -> None:
    scores = simulated(50.0, 1000, np.random.default_rng(0))
    assert one_run_bound(scores, 25.0, delta=1e-6, confidence=0.999) > 4.0


@pytest.mark.parametrize("claim", [GaussianTradeOff(2.0, 1e-5), EpsilonDeltaTradeOff(1.5, 1e-5)])
def test_a_bound_is_above_the_claim_if_and_only_if_the_claim_is_ruled_out(claim: Any) -> None:
    for scale in (1e-3, 0.1, 0.999, 1.0, 1.001, 3.0, 1e3):
        shown = claim.lower_bound(lambda each, scale=scale: each <= scale)
        assert (shown > claim.epsilon(1.0)) == (scale >= 1.0), scale
        if 0.01 < scale < 100 and scale != 1.0:
            assert claim.epsilon(scale * 0.99) < shown < claim.epsilon(scale * 1.01)
    assert claim.lower_bound(lambda scale: False) == 0.0


def test_the_best_threshold_is_where_pilot_canaries_show_most() -> None:
    pilot = simulated(3.0, 4000, np.random.default_rng(1))
    bound = functools.partial(repeated_runs_bound, claim=GaussianTradeOff(1.0, 1e-5))
    best = best_threshold(pilot, bound)
    assert bound(pilot, best) >= max(bound(pilot, at) for at in np.linspace(-1, 4, 21)) * 0.9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CanaryScores([], [1.0]), "Expected held_in to be a vector of one score or more"),
        (lambda: CanaryScores([1.0], [[1.0]]), "Expected held_out to be a vector"),
        (lambda: CanaryScores([math.nan], [1.0]), "1 that are no numbers"),
        (lambda: CanaryScores.of_coins([1.0, 2.0], [True, True]), "Expected held_out"),
        (lambda: clopper_pearson(1, 2, 1.0), "Expected 0 < confidence < 1, got confidence=1.0"),
        (lambda: one_run_bound(guessed(1, 2, 0, 2), 0.5, 0.0, -1.0), "Expected 0 < confidence < 1"),
        (lambda: GaussianTradeOff(0.0, 1e-5), "Expected noise_multiplier > 0"),
        (lambda: GaussianTradeOff(1.0, 0.0), "Expected 0 < delta < 1"),
        (lambda: EpsilonDeltaTradeOff(1.0, 1.0), "Expected 0 <= delta < 1, got delta=1.0"),
        (lambda: EpsilonDeltaTradeOff(-1.0, 0.0), "Expected epsilon > 0"),
        (lambda: auditing.PlanTradeOff("plan"), "Expected a calibrated plan, got plan='plan'"),
    ],
)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
