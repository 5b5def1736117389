"""The plan: noise multipliers against an independent calibration, what a run spends, and says.

One evaluation of ε takes up to 3 s, so most tests ask whether a known noise multiplier is feasible,
which takes two, instead of searching for it again.
"""

import dataclasses
import json
import math
import re
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

import dp_sparse
from dp_sparse.accounting.accountant import epsilon_of
from dp_sparse.accounting.calibration import smallest_noise_multiplier
from dp_sparse.accounting.mechanisms import (
    ExponentialSelection,
    GaussianMechanism,
    beyond_reach,
)
from dp_sparse.accounting.plan import PrivacyBudget, PrivacyPlan, Release
from dp_sparse.noise.gaussian import REACH
from dp_sparse.sampling.base import Sampling
from dp_sparse.sampling.poisson import PoissonSampling
from dp_sparse.sampling.stream import StreamSampling
from tests.reference import adafest
from tests.statements import HEADINGS, sentences

SST2 = PoissonSampling(67_349, 1024, 198)
SST2_DELTA = 1 / 67_349

# N, B, T, ε, the smallest σ: PLD accountant of dp-accounting at interval 1e-4, add or remove,
# δ = 1/N, by bisection to 1e-4 on the feasible side, without the overflow's share of δ.
NOISE_MULTIPLIERS = [
    (67_349, 1024, 198, 1.0, 1.1417358398437503),
    (67_349, 1024, 198, 3.0, 0.7472167968750001),
    (67_349, 1024, 658, 1.0, 1.63956298828125),
    (363_846, 1024, 1066, 1.0, 0.81976318359375),
    (45_840_617, 2048, 22_384, 1.0, 0.57657470703125),
    (6040, 1024, 590, 5.0, 3.292236328125),
]
# The reserve of at most 1e-3·δ for overflows moves σ by less than 1e-4, and each bisection ends
# within 1e-4.
TOLERANCE = 3e-4

# N, passes, ε, σ without amplification: analytic Gaussian mechanism at δ = 1/N, times √passes.
STREAM_NOISE_MULTIPLIERS = [
    (45_840_617, 1, 1.0, 4.960713510688193),
    (45_840_617, 3, 3.0, 3.073683558088523),
    (67_349, 3, 3.0, 2.3607067302809868),
    (67_349, 5, 1.0, 8.141661071127578),
]


def plan(
    sampling: Sampling = SST2, epsilon: float = 1.0, delta: float | None = None, **fields: Any
) -> PrivacyPlan:
    delta = 1 / sampling.num_examples if delta is None else delta
    return PrivacyPlan(PrivacyBudget(epsilon, delta), sampling, **fields)


def spends(sampling: Sampling, noise_multiplier: float) -> float:
    """ε of a whole run, for a budget that is met anyway."""
    given = plan(sampling, epsilon=8.0, noise_multiplier=noise_multiplier)
    return given.spent(sampling.steps).epsilon


@pytest.fixture(scope="module")
def small() -> PrivacyPlan:
    """A calibrated plan of a short run."""
    return plan(PoissonSampling(2000, 50, 40), epsilon=2.0, delta=1e-5).calibrate()


# ------------------------------------------------------------------------------------- calibration


@pytest.mark.cases(1)
@pytest.mark.parametrize(("num_examples", "batch", "steps", "epsilon", "sigma"), NOISE_MULTIPLIERS)
def test_noise_multiplier_of_poisson_sampling(
    num_examples: int, batch: int, steps: int, epsilon: float, sigma: float
) -> None:
    sampling = PoissonSampling(num_examples, batch, steps)
    assert spends(sampling, sigma + TOLERANCE) <= epsilon < spends(sampling, sigma - TOLERANCE)


def test_calibrate_poisson_sampling() -> None:
    num_examples, batch, steps, epsilon, sigma = NOISE_MULTIPLIERS[0]
    found = plan(PoissonSampling(num_examples, batch, steps), epsilon).calibrate()
    assert found.noise_multiplier == pytest.approx(sigma, abs=TOLERANCE)
    spent = found.spent(steps)
    assert 0.999 * epsilon < spent.epsilon <= epsilon
    assert spent.delta == 1 / num_examples


@pytest.mark.parametrize(("num_examples", "passes", "epsilon", "sigma"), STREAM_NOISE_MULTIPLIERS)
def test_calibrate_stream_sampling(
    num_examples: int, passes: int, epsilon: float, sigma: float
) -> None:
    """The accountant rounds up, by less than 1e-3 of σ."""
    found = plan(StreamSampling(num_examples, 1000, passes), epsilon).calibrate()
    assert found.noise_multiplier is not None
    assert sigma - 1e-4 <= found.noise_multiplier <= sigma * (1 + 1e-3) + 2e-4


@pytest.mark.slow
def test_calibrate_returns_another_plan(small: PrivacyPlan) -> None:
    before = dataclasses.replace(small, noise_multiplier=None, plan_id=None)
    assert before.noise_multiplier is None and before.plan_id is None
    again = before.calibrate()
    assert again.noise_multiplier == small.noise_multiplier
    assert again.plan_id != small.plan_id  # one calibration pays for one run
    assert before.noise_multiplier is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        small.noise_multiplier = 0.1  # type: ignore[misc]


def test_calibration_is_on_the_feasible_side_and_tight(small: PrivacyPlan) -> None:
    assert small.noise_multiplier is not None
    steps = small.sampling.steps
    less = dataclasses.replace(small, noise_multiplier=small.noise_multiplier - 3e-4)
    assert small.spent(steps).epsilon <= 2.0 < less.spent(steps).epsilon


def test_a_smaller_capacity_spends_more() -> None:
    """The overflow's share of δ is not free."""
    roomy, tight = (PoissonSampling(2000, 50, 40, capacity) for capacity in (120, 94))
    assert 0.1 < tight.overflow_delta(2.0, 40) / 1e-5 < 0.9
    spent = [plan(s, 2.0, 1e-5, noise_multiplier=1.0).spent(40).epsilon for s in (roomy, tight)]
    assert spent[0] < spent[1] < 2.0


@pytest.mark.parametrize("capacity", [60, 80])
def test_a_budget_that_overflows_exceed_is_refused(capacity: int) -> None:
    infeasible = plan(PoissonSampling(2000, 50, 40, capacity), 2.0, 1e-6)
    with pytest.raises(ValueError, match=r"alone exceed delta=.*Raise sampling\.capacity"):
        infeasible.calibrate()


def test_a_budget_that_releases_exceed_is_refused() -> None:
    histogram = Release("histogram of cities", dp_accounting.GaussianDpEvent(1.0))
    infeasible = plan(PoissonSampling(2000, 50, 40), 1.0, 1e-5, releases=(histogram,))
    with pytest.raises(ValueError, match=r"No noise meets the budget.*histogram of cities"):
        infeasible.calibrate()


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None, True])
@pytest.mark.parametrize("name", ["epsilon", "delta"])
def test_bad_budgets_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected .*{name}.*got {name}="):
        PrivacyBudget(**{"epsilon": 1.0, "delta": 1e-5} | {name: value})


@pytest.mark.parametrize("delta", [1.0, 1.5])
def test_a_delta_of_one_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match=f"Expected 0 < delta < 1, got delta={delta}"):
        PrivacyBudget(1.0, delta)


CRITEO = PoissonSampling(45_840_617, 2048, 22_384, capacity=3000)


def test_the_reach_of_the_noise_is_inside_delta() -> None:
    """At ε = 16 what 64 bits cannot reach has 22 times δ, so such a σ meets no budget."""
    delta = 1 / CRITEO.num_examples
    event = CRITEO.event(GaussianMechanism().event(0.3026), CRITEO.steps)
    assert epsilon_of(event, delta, 1e-3) == pytest.approx(16, abs=0.1)
    tail = CRITEO.participations(CRITEO.steps) * stats.norm.sf(REACH - 1 / 0.3026)
    assert tail > 20 * delta
    with pytest.raises(
        ValueError, match=r"meets delta=2.18\d+e-08 .* noise_multiplier=0.3026: use"
    ):
        plan(CRITEO, 20.0, noise_multiplier=0.3026).spent(CRITEO.steps)
    assert beyond_reach(0.3026) * CRITEO.participations(CRITEO.steps) == pytest.approx(tail)


def test_what_is_left_of_delta_pays_for_the_mechanism() -> None:
    given = plan(CRITEO, 12.0, noise_multiplier=0.38)
    spent, steps = given.spent(CRITEO.steps).epsilon, CRITEO.steps
    failures = given.cost(0.38, steps).failure_delta(spent)
    assert 0.3 < failures * CRITEO.num_examples < 0.9
    event = CRITEO.event(GaussianMechanism().event(0.38), steps)
    assert spent == epsilon_of(
        event, given.budget.delta - given.cost(0.38, steps).failure_delta(12.0), 1e-4
    )
    assert epsilon_of(event, given.budget.delta - failures, 1e-4) <= spent
    assert given.cost(0.38, 0).failure_delta(spent) == 0


def test_calibration_finds_noise_whose_reach_suffices() -> None:
    """At δ = 10⁻¹² and a large ε, the σ that ε alone asks for has a tail beyond δ."""
    sampling = StreamSampling(1000, 100)
    found = plan(sampling, 60.0, 1e-12).calibrate().noise_multiplier
    assert found is not None
    alone = smallest_noise_multiplier(
        lambda sigma, interval: epsilon_of(
            sampling.event(GaussianMechanism().event(sigma), 10), 1e-12, 10 * interval
        ),
        60.0,
    )
    assert beyond_reach(alone) > 1e-12 > beyond_reach(found)


@pytest.mark.parametrize("sigma", [0.3, 0.6, 5.0])
def test_no_split_of_the_difference_reaches_further(sigma: float) -> None:
    """Over coordinates and releases: at most what one coordinate has, and what is left out."""
    rng = np.random.default_rng(3)
    for coordinates in (1, 2, 3, 10, 1000):
        for power in (0.2, 1, 8):
            moves = rng.random(coordinates) ** power
            moves /= sigma * np.linalg.norm(moves)
            chance = np.sum(stats.norm.sf(REACH - moves) - stats.norm.sf(REACH))
            assert chance <= beyond_reach(sigma) + 3e-15 * math.sqrt(coordinates) / sigma


# ----------------------------------------------------------------------------------------- spending


@pytest.mark.slow
def test_spent_grows_with_the_steps(small: PrivacyPlan) -> None:
    epsilons = [small.spent(steps).epsilon for steps in (0, 1, 5, 20, 40)]
    assert all(np.diff(epsilons) > 0)
    assert 0 < epsilons[0] < 1e-9
    assert epsilons[-1] <= small.budget.epsilon
    assert small.spent(3).delta == small.budget.delta


@pytest.mark.parametrize("steps", [-1, 41, 10**6])
def test_steps_outside_the_run_are_refused(small: PrivacyPlan, steps: int) -> None:
    with pytest.raises(ValueError, match=f"0 <= steps <= 40, got steps={steps}"):
        small.spent(steps)


def test_a_plan_without_noise_spends_nothing_that_can_be_told() -> None:
    for ask in (lambda p: p.spent(1), lambda p: p.statement()):
        with pytest.raises(ValueError, match="Expected a calibrated plan"):
            ask(plan())


def test_spent_equals_the_accountant_with_the_overflow_taken_off() -> None:
    sampling = PoissonSampling(2000, 50, 40, 92)
    given = plan(sampling, 2.0, 1e-5, noise_multiplier=1.0)
    spent = given.spent(40).epsilon
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(0.025, dp_accounting.GaussianDpEvent(1.0)), 40
    )
    exact = accountant.get_epsilon(1e-5 - sampling.overflow_delta(spent, 40))
    assert accountant.get_epsilon(1e-5) < exact <= spent
    assert spent <= accountant.get_epsilon(1e-5 - sampling.overflow_delta(2.0, 40)) + 1e-6


# Two Gaussian releases from one Poisson batch, SST-2 with 198 steps: σ1, σ2, ε, and the ε that two
# independently sampled events would claim. From derivation.
SAME_BATCH = [
    (1.0, 1.0, 3.524159144886497, 1.8049098161222117),
    (0.7, 0.7, 10.03307265936922, 4.585139484047688),
    (5.0, 1.0, 1.4111362838632755, 1.3528422874598887),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("first", "second", "right", "wrong"), SAME_BATCH)
def test_releases_from_one_batch_are_one_event(
    first: float, second: float, right: float, wrong: float
) -> None:
    sigma = adafest.combined_noise_multiplier(first, second)
    roomy = dataclasses.replace(SST2, capacity=1500)  # no reserve for overflows
    spent = plan(roomy, 12.0, noise_multiplier=sigma).spent(198).epsilon
    assert spent == pytest.approx(right, rel=2e-3)
    assert spent > 1.03 * wrong


def test_two_poisson_events_would_understate() -> None:
    """A guard on the number above: what the mistake looks like, so that nobody makes it."""
    event = SST2.event(GaussianMechanism().event(1.0), 198)
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(event)
    accountant.compose(event)
    mistaken = accountant.get_epsilon(SST2_DELTA)
    assert mistaken == pytest.approx(1.8049098161222117, rel=1e-3)
    assert mistaken < 0.52 * plan(epsilon=12.0, noise_multiplier=0.5**0.5).spent(198).epsilon


def test_mechanism_event() -> None:
    assert GaussianMechanism().event(1.25) == dp_accounting.GaussianDpEvent(1.25)


def test_releases_compose_jointly_with_training() -> None:
    """Through one privacy loss distribution: more than training alone, less than the sum."""
    sampling = PoissonSampling(2000, 50, 40)
    histogram = Release("histogram", dp_accounting.GaussianDpEvent(3.0))
    alone = plan(sampling, 8.0, 1e-5, noise_multiplier=1.0)
    both = plan(sampling, 8.0, 1e-5, noise_multiplier=1.0, releases=(histogram,))
    training, together = alone.spent(40).epsilon, both.spent(40).epsilon
    before = both.spent(0).epsilon
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_accounting.GaussianDpEvent(3.0))
    assert before == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert max(training, before) < together < 0.9 * (training + before)
    twice = dataclasses.replace(both, releases=(histogram, histogram))
    assert twice.spent(40).epsilon > together


def test_calibration_leaves_room_for_releases() -> None:
    sampling = StreamSampling(1000, 100)
    histogram = Release("histogram", dp_accounting.GaussianDpEvent(4.0))
    without = plan(sampling, 2.0, 1e-5).calibrate()
    with_release = plan(sampling, 2.0, 1e-5, releases=(histogram,)).calibrate()
    assert (with_release.noise_multiplier or 0) > (without.noise_multiplier or math.inf)
    assert with_release.spent(10).epsilon <= 2.0
    assert "histogram" in with_release.statement() and "no other release" in without.statement()


def test_mechanism_is_the_one_given() -> None:
    """A mechanism of twice the sensitivity spends what half the noise multiplier spends."""

    @dataclasses.dataclass(frozen=True)
    class Doubled(GaussianMechanism):
        def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
            return dp_accounting.GaussianDpEvent(noise_multiplier / 2)

    sampling = StreamSampling(1000, 100)
    doubled = plan(sampling, 8.0, 1e-5, mechanism=Doubled(), noise_multiplier=4.0)
    plain = plan(sampling, 8.0, 1e-5, noise_multiplier=2.0)
    assert doubled.spent(10).epsilon == pytest.approx(plain.spent(10).epsilon, rel=1e-9)


def test_streams_pay_by_the_pass() -> None:
    given = plan(StreamSampling(1000, 100, 3), 8.0, 1e-5, noise_multiplier=2.0)
    epsilons = [given.spent(steps).epsilon for steps in (1, 10, 11, 20, 30)]
    assert epsilons[0] == epsilons[1] < epsilons[2] == epsilons[3] < epsilons[4]


# ------------------------------------------------------------------------------------ a given noise


@pytest.mark.slow
def test_with_noise_states_what_the_noise_spends(small: PrivacyPlan) -> None:
    given = small.with_noise(0.8)
    assert given.noise_multiplier == 0.8 and given.plan_id not in (None, small.plan_id)
    exact = dataclasses.replace(small, noise_multiplier=0.8).spent(40)
    assert given.budget.delta == small.budget.delta and given.sampling == small.sampling
    assert given.budget.epsilon == pytest.approx(exact.epsilon, rel=1e-5)
    assert given.budget.epsilon >= given.spent(40).epsilon > small.budget.epsilon
    again = PrivacyPlan(given.budget, small.sampling).calibrate()
    assert again.noise_multiplier == pytest.approx(0.8, abs=2e-4)


@pytest.mark.parametrize("sigma", [0, -1.0, float("nan"), "1", True])
def test_with_noise_refuses_what_is_no_noise(small: PrivacyPlan, sigma: object) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        small.with_noise(sigma)  # type: ignore[arg-type]


def test_with_noise_refuses_noise_without_any_epsilon() -> None:
    short = plan(PoissonSampling(2000, 2000, 1), delta=1e-40)
    with pytest.raises(ValueError, match="delta"):
        short.with_noise(1e-3)


# ---------------------------------------------------------------------------------------- statement


FACTS = (  # of every statement
    "Choices made from this data, such as hyper-parameters, and that no bad value stopped the run",
    "Training loss, metrics, clip fraction, realised batch sizes, quarantine counts",
    "false survivors and step time",
    "It covers weights and optimizer state as fit and model methods return them",
    "and the rows that steps select",
    "dp-accounting's privacy loss distributions (interval 0.0001) give epsilon",
    "noise beyond 8.2 deviations is in delta",
    "architecture, initial and frozen weights and hyper-parameters are public",
    "Adapted statistics, vocabularies and held-out data are public",
    "batches reach fit as sampled",
    "Philox (keyed by the operating system, not cryptographic)",
    "rounded to about 2^-10 deviations",
)
MANY = PoissonSampling(45_840_617, 2048, 22_384)


@pytest.fixture(scope="module")
def statements(small: PrivacyPlan) -> list[str]:
    """Of all kinds of sampling and mechanism, with a release and without."""
    selection = ExponentialSelection(300)
    cities = Release("cities", dp_accounting.GaussianDpEvent(300.0))
    plans = [
        small,
        plan(MANY, noise_multiplier=0.5767),
        plan(StreamSampling(1000, 100, 3), 8.0, 1e-5, noise_multiplier=2.0),
        plan(SST2, mechanism=selection, noise_multiplier=3.0, releases=(cities,)),
    ]
    return [given.statement() for given in plans]


def test_a_statement_has_few_and_short_lines(statements: list[str]) -> None:
    for text in statements:
        lines = sentences(text)
        own = [line for line in lines if "cities" not in line]  # of which a user chose the name
        assert len(lines) <= 17 and max(map(len, own)) <= 115
        assert all(line.endswith(".") and line.count(". ") <= 1 for line in lines)
        assert [line for line in text.splitlines() if not line.startswith("  ")] == HEADINGS


def test_a_statement_has_all_facts_in_order(statements: list[str]) -> None:
    """The promise, an attacker, what is not covered, and what the promise rests on."""
    attacks = ("membership test", "not a person")
    promise = ("differential privacy", "are neighbours if", "It covers", "elease")
    order = (*promise, *attacks, "Choices made", "Training loss")
    for text in statements:
        lines = sentences(text)
        assert all(part in line for part, line in zip(order, lines, strict=False))
        assert [fact for fact in FACTS if fact not in text] == []


def test_statement_of_poisson_sampling(small: PrivacyPlan, statements: list[str]) -> None:
    text = statements[0]
    for part in (
        ", 1e-05)-differential privacy protects one example over at most 40 steps",
        "the budget is epsilon=2.",
        "one has an example that the other lacks (add or remove)",
        "Poisson sampling puts each of 2000 examples in each batch with probability 0.025",
        "by a secret key",
        f"Gaussian mechanism of noise multiplier {small.noise_multiplier:.6g}.",
        "The number of examples (2000), architecture",
        f"batch of more than {small.sampling.batch_capacity} examples stops the run",
        "the probability of that is inside delta",
        "no other release",
    ):
        assert part in text


def test_numbers_of_a_statement_are_bounds(small: PrivacyPlan, statements: list[str]) -> None:
    """Rounded up, to few digits."""
    promise, _, _, _, attack, of_a_group = sentences(statements[0])[:6]
    epsilon = float(promise[1 : promise.index(",")])
    assert small.spent(40).epsilon <= epsilon <= small.spent(40).epsilon * 1.001
    few, _, more, _ = (float(part) for part in re.findall(r"([\d.]+) %", attack))
    for percent, rate in ((few, 1e-3), (more, 1e-2)):
        assert small.attack_power(rate) <= percent / 100 <= small.attack_power(rate) * 1.01
    assert "at 0.1 % false positives" in attack and attack.endswith("at 1 %.")
    assert "An example is protected, not a person: a test for all 10 of one person" in of_a_group
    for part, rate in zip(re.findall(r"([\d.]+) %", of_a_group), (1e-3, 1e-2), strict=True):
        group = small.attack_power(rate, examples=10)
        assert group <= float(part) / 100 <= group * 1.01


def test_statement_of_a_stream(statements: list[str]) -> None:
    text = statements[2]
    assert "at most 30 steps" in text and "zero-out" in text and "Poisson" not in text
    assert "1000 examples in batches of 100, each example at most once in each of 3 passes" in text
    assert "no amplification" in text and "has begun counts as a whole" in text


def test_statement_of_exponential_selection_and_a_release(statements: list[str]) -> None:
    assert "300 exponential mechanisms of epsilon 0.01925 each" in statements[3]
    assert re.search(r"Released besides: cities: epsilon \S+ beside training", statements[3])


def test_a_statement_as_data(small: PrivacyPlan) -> None:
    """The same facts and the same bounds as the text."""
    found = json.loads(small.statement(10, format="json"))
    text = small.statement(10)
    assert list(found) == ["guarantee", "attacker", "not_covered", "assumptions", "mechanism"]
    guarantee = found["guarantee"]
    assert f"({guarantee['epsilon']:g}, {guarantee['delta']:g})-differential" in text
    assert (guarantee["steps"], guarantee["planned_steps"]) == (10, 40)
    assert guarantee["if_steps_were_fixed"]["epsilon"] < guarantee["epsilon"]
    assert guarantee["other_releases"] == [] and guarantee["unit"] == "example"
    assert json.loads(small.statement(format="json"))["guarantee"]["steps"] is None
    for name in ("true_positive_rate_of_one_example", "true_positive_rate_of_10_examples"):
        for rate in found["attacker"][name].values():
            assert f"{100 * rate:.3g} %" in text
    for line in (*found["not_covered"], *found["assumptions"], *guarantee["covers"]):
        assert line in text
    assert all(line in text for line in found["mechanism"]["description"])
    assert found["mechanism"]["noise_multiplier"] == small.noise_multiplier
    assert Sampling.from_config(found["mechanism"]["sampling"]) == small.sampling
    with pytest.raises(ValueError, match="Expected format in"):
        small.statement(format="yaml")
    debugging = dp_sparse.not_private_plan(small, seed=1).with_noise(1.0)
    with pytest.raises(ValueError, match="with privacy, got one of not_private_plan"):
        debugging.statement(format="json")


def test_statement_of_some_steps() -> None:
    given = plan(StreamSampling(1000, 100, 3), 8.0, 1e-5, noise_multiplier=2.0)
    assert "after 4 of 30 steps" in given.statement(4)
    assert "(1e-12, 1e-05)-differential privacy" in given.statement(0)
    assert "above 0.101 % at 0.1 % false positives" in given.statement(0)


# ------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    "sampling",
    [PoissonSampling(2000, 50, 40), StreamSampling(1000, 100, 2)],
    ids=["poisson", "stream"],
)
def test_configuration_round_trip(sampling: Sampling) -> None:
    given = plan(sampling, 2.0, 1e-5, noise_multiplier=1.5, plan_id="abc")
    again = PrivacyPlan.from_config(json.loads(json.dumps(given.get_config())))
    assert again == given
    assert again.plan_id == "abc"
    assert again.sampling.fingerprint == given.sampling.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        {"sampling": PoissonSampling(2000, 50, 41)},
        {"mechanism": ExponentialSelection(5)},
        {"releases": (Release("histogram", dp_accounting.GaussianDpEvent(4.0)),)},
        {"noise_multiplier": 1.6},
    ],
    ids=lambda other: next(iter(other)),
)
def test_plans_of_other_guarantees_have_other_fingerprints(other: dict[str, Any]) -> None:
    """A run goes on under a plan of its fingerprint: all that ε depends on is in it."""
    given = plan(PoissonSampling(2000, 50, 40), 2.0, 1e-5, noise_multiplier=1.5)
    assert dataclasses.replace(given, **other).fingerprint != given.fingerprint
    same = dataclasses.replace(given, plan_id="abc", budget=PrivacyBudget(3.0, 1e-5))
    assert same.fingerprint == given.fingerprint


def test_configuration_of_numpy_numbers() -> None:
    budget = PrivacyBudget(np.float32(1.0), np.float32(1e-5))
    given = PrivacyPlan(budget, StreamSampling(np.int64(1000), 100))
    assert PrivacyPlan.from_config(json.loads(json.dumps(given.get_config()))) == given


def test_a_saved_plan_keeps_its_releases() -> None:
    histogram = Release("histogram", dp_accounting.GaussianDpEvent(4.0))
    given = plan(releases=(histogram,))
    assert PrivacyPlan.from_config(json.loads(json.dumps(given.get_config()))) == given


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mechanism": "gaussian"}, r"GaussianMechanism\(\) or .*got mechanism='gaussian'"),
        ({"budget": 1.0}, r"Expected budget=PrivacyBudget\(epsilon, delta\), got budget=1.0"),
        ({"sampling": None}, r"PoissonSampling\(...\) or .*got sampling=None"),
        ({"releases": Release("x", dp_accounting.NoOpDpEvent())}, r"a tuple, got releases=Release"),
        ({"releases": (3,)}, r"every release to be a Release, got 3: use releases=\(rows.release"),
        ({"noise_multiplier": -1.0}, "noise_multiplier > 0 .*got noise_multiplier=-1.0"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    given = {"budget": PrivacyBudget(1.0, 1e-5), "sampling": SST2} | fields
    with pytest.raises(ValueError, match=message):
        PrivacyPlan(**given)


def test_unregistered_classes_are_named() -> None:
    config = plan().get_config()
    for name, base in (("sampling", "Sampling"), ("mechanism", "Mechanism")):
        with pytest.raises(ValueError, match=f"Expected a {base} among .*got 'Nothing'"):
            PrivacyPlan.from_config(config | {name: {"class": "Nothing"}})


def test_an_impossible_budget_without_releases_blames_none() -> None:
    sampling = PoissonSampling(num_examples=10, expected_batch_size=10, steps=10**9, capacity=10)
    with pytest.raises(ValueError, match=r"Raise the budget\.$"):
        PrivacyPlan(PrivacyBudget(1e-6, 1e-12), sampling).calibrate()
