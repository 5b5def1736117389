"""The threshold keeps its δ, exactly and by simulation, and the plan pays for both parts."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest

import dp_sparse
from dp_sparse.accounting import DeltaDpEvent, Release
from dp_sparse.accounting.accountant import accountant_of
from dp_sparse.selection.vocabulary.counting import ValueCounts
from dp_sparse.selection.vocabulary.draw import released
from dp_sparse.selection.vocabulary.threshold import VocabularyNoise, noise_paid_by
from dp_sparse.selection.vocabulary.vocabulary import VocabularyDraw
from tests.reference import vocabulary as reference
from tests.reference.distributions import SIGNIFICANCE, binomial

RUNS = 40_000
NOISE, CAP = VocabularyNoise(noise_multiplier=2.0, delta=0.05), 4


@pytest.mark.parametrize("sigma", [0.05, 1.0, 37.3])
@pytest.mark.parametrize("max_values", [1, 2, 50, 10_000])
@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-8])
def test_it_is_the_smallest_that_keeps_delta(sigma: float, max_values: int, delta: float) -> None:
    """An example of m values that nobody else has is seen with a probability of at most δ."""
    found = VocabularyNoise(sigma, delta).threshold(max_values)
    deviation = sigma * math.sqrt(max_values)
    assert found == reference.threshold(deviation, max_values, delta)
    assert reference.leak(found, deviation, max_values) <= delta
    assert reference.leak(found - 1, deviation, max_values) > delta


def runs_that_leak(noise: VocabularyNoise, cap: int, alone: int) -> int:
    """Of many runs, those that release one of `alone` values of a single example."""
    values = ValueCounts([*range(RUNS * alone)], np.ones(RUNS * alone, np.int64))
    found = released({"c": values}, VocabularyDraw(noise, cap, "run", "draw"))
    return len({value // alone for value in found["c"]})  # type: ignore[operator]


def too_often(leaks: int, delta: float) -> bool:
    return leaks > delta * RUNS and binomial(leaks, RUNS, delta) < SIGNIFICANCE


def test_an_example_of_unique_values_is_seldom_seen() -> None:
    leaks = runs_that_leak(NOISE, CAP, alone=CAP)
    exact = reference.leak(NOISE.threshold(CAP), 2.0 * CAP**0.5, CAP)
    assert binomial(leaks, RUNS, exact) > SIGNIFICANCE
    assert not too_often(leaks, NOISE.delta)
    assert not too_often(runs_that_leak(NOISE, CAP, alone=1), NOISE.delta)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right, noise, cap: right(noise, cap) - 1,
        lambda right, noise, cap: right(noise, 1),  # as if the noise were that of one value
        lambda right, noise, cap: math.ceil(0.5 + 4.0 * 1.645),  # no union over the values
        lambda right, noise, cap: right(dataclasses.replace(noise, delta=0.15), cap),
    ],
    ids=["one less", "of one value", "of each value", "of another delta"],
)
def test_a_lower_threshold_is_noticed(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VocabularyNoise.threshold
    monkeypatch.setattr(VocabularyNoise, "threshold", lambda self, m: wrong(right, self, m))  # type: ignore[operator]
    assert too_often(runs_that_leak(NOISE, CAP, alone=CAP), NOISE.delta)


def test_more_values_than_the_cap_would_be_noticed() -> None:
    """So values that the cap left out must be no candidates."""
    assert too_often(runs_that_leak(NOISE, CAP, alone=4 * CAP), NOISE.delta)


def test_noise_of_64_bits_leaves_no_room_for_less() -> None:
    with pytest.raises(ValueError, match=r"delta=1e-12 above 2\*\*-65 for each of max_values=1000"):
        VocabularyNoise(1.0, 1e-12).threshold(10**10)
    deep = VocabularyNoise(1.0, 1e-15)
    assert 1 - math.erf((deep.threshold(1) - 0.5) / math.sqrt(2)) < 2e-15


@pytest.mark.parametrize("field", ["noise_multiplier", "delta"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_numbers(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"Expected .*{field}"):
        dataclasses.replace(NOISE, **{field: value})


# The two values of an example: those that it shares with others, by their counts, or has alone.
SHARED_OR_ALONE = {
    "both alone": [(1, 0), (1, 0)],
    "one alone": [(6, 5), (1, 0)],
    "one at the threshold": [(5, 4), (1, 0)],
    "one of two examples": [(2, 1), (1, 0)],
    "none alone": [(9, 8), (30, 29)],
}


@pytest.mark.parametrize("name", SHARED_OR_ALONE)
def test_the_whole_vocabulary_costs_at_most_what_is_paid(name: str) -> None:
    """δ at every ε, of all that may be seen, exact and in both directions."""
    noise, counts = VocabularyNoise(1.0, 0.02), SHARED_OR_ALONE[name]
    epsilons = np.array([0.0, 0.2, 0.5, 1.0, 2.0, 4.0])
    paid = accountant_of(noise.event, 1e-3).deltas(epsilons)

    def cost(deviation: float, threshold: int) -> np.ndarray:
        curve = [reference.deltas(counts, deviation, threshold, each) for each in epsilons]
        return np.max(curve, axis=1)

    right = noise.threshold(2)
    assert np.all(cost(2**0.5, right) <= paid)
    if "none" not in name:
        assert np.any(cost(2**0.5, right - 2) > paid)
    else:
        assert np.any(cost(0.9 * 2**0.5, right) > paid)


class TestCost:
    def test_a_gaussian_mechanism_and_a_probability(self) -> None:
        gaussian = dp_accounting.GaussianDpEvent(2.0)
        assert NOISE.event == dp_accounting.ComposedDpEvent((gaussian, DeltaDpEvent(0.05)))
        assert "noise multiplier 2; probability" in NOISE.release.name

    def test_a_plan_knows_it_again(self) -> None:
        others = Release("rows", dp_accounting.GaussianDpEvent(9.0))
        saved = Release.from_config(NOISE.release.get_config())
        assert noise_paid_by((others, saved)) == NOISE
        assert noise_paid_by((others,)) is None

    def test_the_plans_delta_includes_the_thresholds(self) -> None:
        """ε of the plan is that of the Gaussian parts at what is left of δ."""
        delta, sampling = 1e-5, dp_sparse.StreamSampling(1000, 500)
        budget = dp_sparse.PrivacyBudget(1.0, delta)

        def spent(budget: dp_sparse.PrivacyBudget, *releases: Release) -> float:
            plan = dp_sparse.PrivacyPlan(budget, sampling, releases=releases, noise_multiplier=4.0)
            return plan.spent(2).epsilon

        for part in (0.01, 0.5):
            whole = spent(budget, VocabularyNoise(8.0, part * delta).release)
            gaussian = Release("noise alone", dp_accounting.GaussianDpEvent(8.0))
            rest = (1 - part) * delta / (1 - part * delta)
            assert whole == pytest.approx(spent(dp_sparse.PrivacyBudget(1.0, rest), gaussian), 1e-6)
            assert whole > spent(budget, gaussian) * (1 + part / 50)

    def test_no_epsilon_meets_a_delta_below_the_thresholds(self) -> None:
        release = VocabularyNoise(8.0, 1e-4).release
        plan = dp_sparse.PrivacyPlan(
            dp_sparse.PrivacyBudget(1.0, 1e-5), dp_sparse.StreamSampling(1000, 500)
        )
        with pytest.raises(ValueError, match="No noise meets the budget"):
            dataclasses.replace(plan, releases=(release,)).calibrate()


def test_a_release_of_that_name_and_of_other_kind_is_none() -> None:
    event = dp_accounting.GaussianDpEvent(3.0)
    for other in (event, dp_accounting.ComposedDpEvent((event, event))):
        release = dp_sparse.Release("private vocabulary of cities", other)
        assert noise_paid_by([release]) is None
    paid = VocabularyNoise(3.0, 1e-6)
    assert noise_paid_by([release, paid.release]) == paid
