"""What a run guarantees, for a reader in a hurry, under five headings; the same as JSON.

Guarantee, Against an attacker, Not covered, Assumptions, Mechanism: at most 17 short lines below
them, and one more where the length of the run matters. Other releases make their line longer.

It also computes the highest true-positive rate of a membership test from a curve δ(ε).

A membership test sees everything released and decides whether an example was in the data. Its
false-positive rate is the probability that it says yes for an example that was not. Its
true-positive rate is the probability that it says yes for one that was. O(points of the curve).
"""

import dataclasses
import decimal
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.calibration import FINE
from dp_sparse.accounting.privacy_loss import LARGEST, UNIT
from dp_sparse.sampling import Sampling

RATES = (1e-3, 1e-2)  # of false positives
GROUP = 10  # examples of one person, for whom the statement has rates, too
FORMATS = ("text", "json")

NO_PRIVACY = (  # with the seed
    "This run has no privacy: its batches and its noise follow from seed {}, for debugging.\n"
    "Anyone who knows the seed can tell which examples it was trained on: release nothing of it."
)
_NOT_COVERED = (
    "Choices made from this data, such as hyper-parameters, and that no bad value stopped the run.",
    "Training loss, metrics, clip fraction, realised batch sizes, quarantine counts, false "
    "survivors and step time.",
)
_COVERED = (
    "It covers weights and optimizer state as fit and model methods return them, and the rows that "
    "steps select.",
)
_SHORTER = (
    "It is {} if the number of steps was chosen without looking at the run; "
    "otherwise all {} steps count."
)
_ANY_TIME = (
    "This holds whatever rule stops the run, with the epsilon of the steps taken: ex-post privacy, "
    "one delta in all."
)
_ASSUMED = (
    "Adapted statistics, vocabularies and held-out data are public, and batches reach fit as "
    "sampled.",
    "Noise is drawn by Philox (keyed by the operating system, not cryptographic) and rounded to "
    "about 2^-10 deviations.",
)
EPSILONS = np.concatenate(
    [[0.0], np.geomspace(1e-4, LARGEST, 1023)]
)  # at which curves are evaluated


@dataclasses.dataclass(frozen=True)
class Statement:
    """What a statement is made of.

    Attributes:
        guaranteed: The (ε, δ) of the run, whatever ended it.
        if_fixed: That of its steps if their number did not follow from the run, where it is less.
        any_time: Whether `guaranteed` is of the steps taken by any rule that stops the run.
        budget: Of the plan.
        steps: How many of `sampling.steps` were taken; None of a plan, whatever was taken.
        sampling: How batches were drawn.
        mechanism: A sentence on one step, with its noise multiplier.
        noise_multiplier: Of a step.
        releases: Each other release with its price.
        true_positive_rates: The highest of any membership test at each rate of `RATES`, for one
            example, and then for `GROUP` examples.
        not_guaranteed: Who claims another ε without proof, and which.
    """

    guaranteed: PrivacyBudget
    if_fixed: PrivacyBudget | None
    any_time: bool
    budget: PrivacyBudget
    steps: int | None
    sampling: Sampling
    mechanism: str
    noise_multiplier: float
    releases: Sequence[str]
    true_positive_rates: Sequence[float]
    not_guaranteed: tuple[str, float] | None = None

    def text(self) -> str:
        """Headings, and below each of them sentences, one or two a line, indented by two spaces."""
        claim = self.not_guaranteed
        lines = [] if claim is None else [beside(*claim, self.budget)]
        for heading, own in self._sections().items():
            lines += [heading, *(f"  {line}" for line in own)]
        return "\n".join(lines)

    def json(self) -> str:
        """The same as data; numbers are bounds, rounded up as in the text."""
        few, more = (f"{rate:g}" for rate in RATES)
        one_few, one_more, all_few, all_more = (_up(r, 3) for r in self.true_positive_rates)
        claim = self.not_guaranteed
        described: dict[str, Any] = {
            "guarantee": {
                **_bounds(self.guaranteed),
                "unit": "example",
                "neighbouring_datasets": self.sampling.neighbouring,
                "steps": self.steps,
                "planned_steps": self.sampling.steps,
                "budget": dataclasses.asdict(self.budget),
                "if_steps_were_fixed": None if self.if_fixed is None else _bounds(self.if_fixed),
                "holds_for_any_stopping_rule": self.any_time,
                "other_releases": list(self.releases),
                "covers": list(_COVERED),
                "claimed_but_not_guaranteed": None
                if claim is None
                else {"by": claim[0], "epsilon": claim[1]},
            },
            "attacker": {
                "true_positive_rate_of_one_example": {few: one_few, more: one_more},
                f"true_positive_rate_of_{GROUP}_examples": {few: all_few, more: all_more},
            },
            "not_covered": list(_NOT_COVERED),
            "assumptions": self._assumptions(),
            "mechanism": {
                "sampling": self.sampling.get_config(),
                "noise_multiplier": self.noise_multiplier,
                "description": self._mechanism(),
            },
        }
        return json.dumps(described, indent=1)

    def _sections(self) -> dict[str, list[str]]:
        return {
            "Guarantee": self._guarantee(),
            "Against an attacker": _attack(self.true_positive_rates),
            "Not covered": list(_NOT_COVERED),
            "Assumptions": self._assumptions(),
            "Mechanism": self._mechanism(),
        }

    def _guarantee(self) -> list[str]:
        planned, others = self.sampling.steps, self.releases
        shorter = self.if_fixed
        return [
            f"{_pair(self.guaranteed)}-differential privacy protects one example "
            f"{_length(self.steps, planned)}; the budget is epsilon={self.budget.epsilon:g}.",
            *([] if shorter is None else [_SHORTER.format(_pair(shorter), planned)]),
            *([_ANY_TIME] if self.any_time else []),
            f"Two datasets are neighbours if {self.sampling.neighbouring}.",
            *_COVERED,
            f"Released besides: {'; '.join(others)}." if others else "There is no other release.",
        ]

    def _assumptions(self) -> list[str]:
        return [
            f"The number of examples ({self.sampling.num_examples}), architecture, initial and "
            "frozen weights and hyper-parameters are public.",
            *_ASSUMED,
        ]

    def _mechanism(self) -> list[str]:
        return [
            *self.sampling.description.splitlines(),
            self.mechanism,
            f"dp-accounting's privacy loss distributions (interval {FINE:g}) give epsilon; noise "
            "beyond 8.2 deviations is in delta.",
        ]


def _bounds(budget: PrivacyBudget) -> dict[str, float]:
    return {"epsilon": _up(budget.epsilon, 4), "delta": _up(budget.delta, 3)}


def _pair(budget: PrivacyBudget) -> str:
    return f"({rounded_up(budget.epsilon, 4)}, {rounded_up(budget.delta, 3)})"


def _length(steps: int | None, of: int) -> str:
    return f"over at most {of} steps" if steps is None else f"after {steps} of {of} steps"


def beside(by: str, claimed: float, budget: PrivacyBudget) -> str:
    """A claim that is not guaranteed, and what is."""
    return (
        f"{by} claims epsilon={claimed:.4g}, which is not guaranteed; "
        f"epsilon={rounded_up(budget.epsilon, 4)} is."
    )


def _attack(rates: Sequence[float]) -> list[str]:
    """A line for one example, a line for the examples of one person."""
    few, more = (f"{100 * rate:g} %" for rate in RATES)
    own = [f"{rounded_up(100 * rate, 3)} %" for rate in rates]
    return [
        f"No membership test has a true-positive rate above {own[0]} at {few} false positives, or "
        f"above {own[1]} at {more}.",
        f"An example is protected, not a person: a test for all {GROUP} of one person may reach "
        f"{own[2]} and {own[3]}.",
    ]


def rounded_up(value: float, digits: int) -> str:
    """The bound in few digits, rounded so that it is still a bound."""
    return f"{_up(value, digits):.{digits}g}"


def _up(value: float, digits: int) -> float:
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return float(up.create_decimal(repr(value)))


def true_positive_rate(
    epsilons: np.ndarray, deltas: np.ndarray, false_positive_rate: float
) -> float:
    """The highest true-positive rate of any membership test at a false-positive rate, rounded up.

    The minimum over the curve of `e^ε·FPR + δ` and of `1 − e^−ε·(1 − FPR − δ)`, at most 1. On
    `EPSILONS` it is above the bound of the whole curve by less than 10⁻³.

    Args:
        epsilons: float64 `[points]`, each >= 0.
        deltas: float64 `[points]`, each at or above the true δ at its ε.
        false_positive_rate: FPR in (0, 1).

    ### Formal Guarantees
    Let (ε, δ)-differential privacy hold at each point, in both directions between two neighbouring
    datasets. A test says yes for a set of releases. Privacy of that set gives TPR ≤ e^ε·FPR + δ,
    and privacy of its complement gives 1 − FPR ≤ e^ε·(1 − TPR) + δ (Wasserman and Zhou 2010,
    Theorem 2.4; Kairouz, Oh and Viswanath 2015, Theorem 2.1). Each point gives a bound, so their
    minimum is a bound, for any points. With all ε ≥ 0 it is the symmetric trade-off function of
    this δ(ε): for a pair with this curve in both directions no bound is smaller (Dong, Roth and Su
    2022, section 2). The bound holds for every test, also for a randomised one and for one that
    knows all other examples, and whichever of the two datasets is the true one.
    """
    ahead = np.exp(epsilons) * false_positive_rate + deltas
    reverse = -np.expm1(-epsilons) + np.exp(-epsilons) * (false_positive_rate + deltas)
    rounding = 1 + 16 * UNIT  # terms are positive, so errors are relative
    return min(float(np.min(np.minimum(ahead, reverse))) * rounding, 1.0)


def of_a_group(
    epsilons: np.ndarray, deltas: np.ndarray, false_positive_rate: float, examples: int
) -> float:
    """The highest true-positive rate of a test for a group of examples: all are in, or none is.

    Args:
        epsilons: As in `true_positive_rate`.
        deltas: As in `true_positive_rate`, of one example.
        false_positive_rate: FPR in (0, 1).
        examples: k >= 1.

    ### Formal Guarantees
    From the dataset without the group to the one with it there are k neighbours in a row. Let T(x)
    bound the rate at which any test says yes on a dataset, if it says yes at the rate x on a
    neighbour. T does not fall with x, so T applied k times bounds it at the end of the row (Dong,
    Roth and Su 2022, Theorem 2.14). For a Gaussian mechanism that is exact, up to the grid: σ
    becomes σ/k.
    """
    rate = false_positive_rate
    for _ in range(examples):
        if rate >= 1:
            break
        rate = true_positive_rate(epsilons, deltas, rate)
    return rate
