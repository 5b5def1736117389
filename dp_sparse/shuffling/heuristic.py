"""Plans whose noise is what Theorem 6 of "Shuffled DP-SGD" asks for: more is claimed than is true.

The paper composes the theorem's steps by advanced composition, after amplification by sampling
(its Theorems 1 and 2). Both ε stand in every plan: the claimed one, and that of plain DP-SGD.
"""

import dataclasses
import math

from dp_sparse.accounting import GaussianMechanism, PrivacyPlan
from dp_sparse.core import validate
from dp_sparse.sampling import PoissonSampling, StreamSampling
from dp_sparse.shuffling.theorem6 import theorem6_sigma_not_a_guarantee


@dataclasses.dataclass(frozen=True)
class Theorem6Mechanism(GaussianMechanism):
    """A Gaussian mechanism whose noise follows from a claim that is not guaranteed.

    Attributes:
        claimed_epsilon: Of all steps.
        batch_clip_ratio: c′/c, for which the theorem claims it.
    """

    claimed_epsilon: float = math.inf
    batch_clip_ratio: float = 1.0

    def __post_init__(self) -> None:
        validate.positive("claimed_epsilon", self.claimed_epsilon)
        validate.positive("batch_clip_ratio", self.batch_clip_ratio)

    @property
    def not_guaranteed(self) -> tuple[str, float]:
        """Who claims, and which ε."""
        return 'Theorem 6 of "Shuffled DP-SGD"', self.claimed_epsilon


def theorem6_plan_not_a_guarantee(
    plan: PrivacyPlan, dimension: float, clip_norm: float, batch_clip_norm: float
) -> PrivacyPlan:
    """A plan with the noise for which Theorem 6 claims the budget of `plan`. It guarantees less.

    Its budget is what the noise guarantees, as DP-SGD. `ShuffledDPSGDOptimizer` takes it with
    `heuristic=True` alone.

    Args:
        plan: With Poisson sampling or a stream, and without releases.
        dimension: d >= 2, the number of weights that are permuted.
        clip_norm: c.
        batch_clip_norm: c′ >= c.

    Raises:
        ValueError: Other sampling, a plan with releases, or an argument out of its range.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=1000, batch_size=1000)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.25, 5e-6), sampling)
        >>> wrong = dp_sparse.theorem6_plan_not_a_guarantee(
        ...     plan, dimension=85.8e6, clip_norm=1.0, batch_clip_norm=250**0.5)
        >>> print(wrong.statement().splitlines()[0])
        Theorem 6 of "Shuffled DP-SGD" claims epsilon=0.25, which is not guaranteed;
        epsilon=4.902 is.

    ### Formal Guarantees
    The new plan's budget, statement and `spent` are those of DP-SGD at its noise.
    """
    if not isinstance(plan, PrivacyPlan) or plan.releases:
        raise ValueError(f"Expected a plan without releases, got plan={plan!r}.")
    sigma = min(
        theorem6_sigma_not_a_guarantee(*step, dimension, clip_norm, batch_clip_norm)
        for step in _budgets_of_a_step(plan)
    )
    mechanism = Theorem6Mechanism(plan.budget.epsilon, batch_clip_norm / clip_norm)
    return dataclasses.replace(plan, mechanism=mechanism).with_noise(sigma)


def _budgets_of_a_step(plan: PrivacyPlan) -> list[tuple[float, float]]:
    """(ε, δ) of a step by basic, and by advanced composition with half of δ, before sampling."""
    probability, steps = _uses_of_an_example(plan)
    epsilon, delta = plan.budget.epsilon, plan.budget.delta
    root = math.sqrt(2 * steps * math.log(2 / delta))
    advanced = (math.sqrt(root**2 + 2 * steps * epsilon) - root) / steps
    each = delta / (steps * probability)
    budgets = [(epsilon / steps, each), (advanced, each / 2)]
    return [(math.log1p(math.expm1(e) / probability), min(d, 0.5)) for e, d in budgets]


def _uses_of_an_example(plan: PrivacyPlan) -> tuple[float, int]:
    """The probability that a step uses an example, and how many steps may."""
    sampling = plan.sampling
    if isinstance(sampling, PoissonSampling):
        return sampling.sampling_probability, sampling.steps
    if isinstance(sampling, StreamSampling):
        return 1.0, sampling.passes
    raise ValueError(
        f"Expected a plan with PoissonSampling or StreamSampling, got sampling={sampling!r}."
    )
