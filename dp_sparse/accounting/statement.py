"""What a run guarantees, for a reader in a hurry: the promise, what an attacker can do, limits.

At most 15 lines of one or two sentences, and one more where the length of the run matters. Other
releases make their line longer.
"""

import decimal
from collections.abc import Sequence

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.calibration import FINE
from dp_sparse.sampling import Sampling

RATES = (1e-3, 1e-2)  # of false positives
GROUP = 10  # examples of one person, for whom the statement has rates, too

NO_PRIVACY = (  # with the seed
    "This run has no privacy: its batches and its noise follow from seed {}, for debugging.\n"
    "Who knows the seed can tell which examples it was trained on: release nothing of it."
)
_NOT_COVERED = (
    "Not covered are choices made from this data, such as hyper-parameters, and that no bad value "
    "stopped the run.",
    "Nor are training loss, metrics, clip fraction, realised batch sizes, quarantine counts, false "
    "survivors, step time.",
)
_COVERED = (
    "Covered are weights, optimizer state and updated rows of one run, at every step, {}.",
    "LazyDP (float32 rows) covers weights and state only as fit and model methods return them, and "
    "no updated rows.",
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
    "Assumed: adapted statistics, vocabularies and held-out data are public, and batches reach fit "
    "as sampled.",
    "Noise is drawn by Philox (keyed by the operating system, not cryptographic) and rounded to "
    "about 2^-10 deviations.",
)


def statement(
    *,
    guaranteed: PrivacyBudget,
    if_fixed: PrivacyBudget | None,
    any_time: bool,
    budget: PrivacyBudget,
    steps: int | None,
    sampling: Sampling,
    mechanism: str,
    releases: Sequence[str],
    true_positive_rates: Sequence[float],
    not_guaranteed: tuple[str, float] | None = None,
) -> str:
    """Sentences on a run, one or two a line.

    Args:
        guaranteed: The (ε, δ) of the run, whatever ended it.
        if_fixed: That of its steps if their number did not follow from the run, where it is less.
        any_time: Whether `guaranteed` is of the steps taken by any rule that stops the run.
        budget: Of the plan.
        steps: How many of `sampling.steps` were taken; None of a plan, whatever was taken.
        sampling: How batches were drawn.
        mechanism: A sentence on one step, with its noise multiplier.
        releases: Each other release with its price.
        true_positive_rates: The highest of any membership test at each rate of `RATES`, for one
            example, and then for `GROUP` examples.
        not_guaranteed: Who claims another ε without proof, and which.
    """
    lines = [
        *([] if not_guaranteed is None else [beside(*not_guaranteed, budget)]),
        f"{_pair(guaranteed)}-differential privacy protects one example "
        f"{_length(steps, sampling.steps)}; the budget is epsilon={budget.epsilon:g}.",
        *([] if if_fixed is None else [_SHORTER.format(_pair(if_fixed), sampling.steps)]),
        *([_ANY_TIME] if any_time else []),
        f"Of two neighbouring datasets, {sampling.neighbouring}.",
        *_attack(true_positive_rates),
        *_NOT_COVERED,
        *_covered(releases),
        sampling.description,
        mechanism,
        f"dp-accounting's privacy loss distributions (interval {FINE:g}) give epsilon; noise "
        "beyond 8.2 deviations is in delta.",
        f"Public are the number of examples ({sampling.num_examples}), architecture, initial and "
        "non-trainable weights, hyper-parameters.",
        *_ASSUMED,
    ]
    return "\n".join(lines)


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
        f"Protected is an example, not a person: a test for all {GROUP} of one person may reach "
        f"{own[2]} and {own[3]}.",
    ]


def _covered(releases: Sequence[str]) -> list[str]:
    of_training, of_lazy = _COVERED
    others = f"and {'; '.join(releases)}" if releases else "and no other release"
    return [of_training.format(others), of_lazy]


def rounded_up(value: float, digits: int) -> str:
    """The bound in few digits, rounded so that it is still a bound."""
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(up.create_decimal(repr(value))):.{digits}g}"
