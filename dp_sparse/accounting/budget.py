"""The budget of a training run.

It also says what holds if a run stops because of what it showed: which lengths share its δ.

What a run of t steps costs is known for every t. A rule that stops at the t where the releases look
worst for an example makes more of it than any single t does: for a Gaussian mechanism the δ at the
ε of the length that came out is then 9 to 22 times too small. `stopping="any time"` gives a share
of δ to each of a few lengths.

### Formal Guarantees
Let the run publish Y_1, …, Y_T, and let a rule stop it after τ steps: τ = t is decided by
Y_1, …, Y_t and by numbers that are independent of the data. Let t_0 = T > t_1 > … be lengths that
are chosen beforehand, let the first t_k steps, with all releases, be (ε_k, δ_k)-private, and let
k(τ) be a length with t_k ≥ τ that depends on τ alone. Then for neighbouring D and D', and every set
S of what such a run may publish, τ included,

    P[M(D) ∈ S] ≤ E[e^ε(τ) · 1(M(D') ∈ S)] + Σ_k δ_k,    ε(τ) = ε_k(τ).

Proof. Let S_k be the part of S with k(τ) = k. On it τ ≤ t_k, so whether the outcome is in S_k
follows from Y_1, …, Y_t_k and the independent numbers: S_k is a test on a run of exactly t_k steps.
Hence P[M(D) ∈ S_k] ≤ e^ε_k · P[M(D') ∈ S_k] + δ_k, and the sum over k is the claim. ∎

That is (ε, δ)-differential privacy with an ε that is part of what is published: ex-post privacy
(Ligett et al. 2017), with the δ of Whitehouse, Ramdas, Rogers and Wu (2023). With one length, T, it
is what holds for any run: (ε_T, δ), whatever stopped it. Since t_k ≥ τ is all that k(τ) needs, the
smallest ε_k of these counts. A run that stopped before its first step, under a plan without
releases, has published nothing of the data: ε = 0.
"""

import dataclasses
import math
from collections.abc import Callable

from dp_sparse.core import validate

FIXED, ANY_TIME = "fixed", "any time"
RULES = (FIXED, ANY_TIME)
_HALVINGS = 7  # below T / 128 steps a run counts as one of T / 128


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The (ε, δ) that a training run may spend in all.

    Attributes:
        epsilon: ε > 0.
        delta: 0 < δ < 1; at most 1 / number of examples for a meaningful guarantee.

    Examples:
        >>> import dp_sparse
        >>> num_examples = 1_000_000
        >>> dp_sparse.PrivacyBudget(epsilon=1.0, delta=1 / num_examples)
        PrivacyBudget(epsilon=1.0, delta=1e-06)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if (self.epsilon, self.delta) == (math.inf, 1):
            return  # no privacy, of a plan for debugging
        object.__setattr__(self, "epsilon", validate.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", validate.probability("delta", self.delta))


def lengths(steps: int, delta: float) -> list[tuple[int, float]]:
    """T, T/2, T/4, …, rounded up, the longest first, with ½, ¼, ⅛, … of δ."""
    each = dict.fromkeys(-(-steps // 2**halvings) for halvings in range(_HALVINGS + 1))
    return [(length, delta / 2 ** (place + 1)) for place, length in enumerate(each)]


def of_all_steps(budget: PrivacyBudget, stopping: str) -> PrivacyBudget:
    """What all steps of a plan may spend: all of δ, or the share of the longest run."""
    if stopping == FIXED:
        return budget
    return PrivacyBudget(budget.epsilon, lengths(1, budget.delta)[0][1])


def epsilon_at_any_time(
    epsilon: Callable[[int, PrivacyBudget], float], budget: PrivacyBudget, steps: int, taken: int
) -> float:
    """ε of a run that a rule stopped after `taken` of `steps` steps, at the budget's δ.

    It does not fall with `taken`. One evaluation for each length from `taken` on, at most eight.

    Args:
        epsilon: Of a run of a length that was chosen beforehand, at the δ of a budget.
        budget: Of the plan.
        steps: T.
        taken: τ, at most T.
    """
    return min(
        epsilon(length, PrivacyBudget(budget.epsilon, share))
        for length, share in lengths(steps, budget.delta)
        if length >= taken
    )
