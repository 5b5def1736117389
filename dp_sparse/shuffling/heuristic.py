"""Plans whose noise is what Theorem 6 of "Shuffled DP-SGD" asks for: more is claimed than is true.

The paper composes the theorem's steps by advanced composition, after amplification by sampling
(its Theorems 1 and 2). Both ε stand in every plan: the claimed one, and that of plain DP-SGD.

The noise is what a theorem on shuffled DP-SGD asks for, which is no guarantee.

"Shuffled DP-SGD", Theorem 6, equations 25 and 26: weights are permuted at random before they are
released, so less noise is said to do. It does not: anyone who knows the weights before a step
matches the released ones with them, undoes the permutation, and is left with the Gaussian mechanism
of this small noise. The proof bounds δ from below where it must bound it from above, and
approximates sums of lognormal variables.
"""

import dataclasses
import math

import numpy as np
from scipy import optimize, special

from dp_sparse.accounting import GaussianMechanism, PrivacyPlan
from dp_sparse.core import validate
from dp_sparse.sampling import PoissonSampling, StreamSampling

_SMALLEST, _LARGEST, _POINTS = 1e-3, 1e4, 4000  # noise multipliers that are looked at


def theorem6_sigma_not_a_guarantee(
    epsilon: float, delta: float, dimension: float, clip: float, batch_clip: float
) -> float:
    """σ by Theorem 6 of "Shuffled DP-SGD", in units of `clip`. It guarantees nothing.

    Args:
        epsilon: What the theorem claims of one step.
        delta: Likewise.
        dimension: d >= 2, the number of weights that are permuted.
        clip: c, the norm to which each example's gradient is clipped.
        batch_clip: c′, the norm to which their sum is clipped.

    Returns:
        The least σ/c above which the theorem's condition holds, float64.

    Raises:
        ValueError: An argument out of its range, or no σ between 10⁻³ and 10⁴ meets it.

    Examples:
        >>> import dp_sparse
        >>> sigma = dp_sparse.theorem6_sigma_not_a_guarantee(
        ...     epsilon=0.25, delta=5e-6, dimension=85.8e6, clip=1.0, batch_clip=250**0.5)
        >>> claimed = dp_sparse.auditing.GaussianTradeOff(sigma, delta=5e-6)
        >>> print(f"sigma {sigma:.3f}: claimed 0.25, true {claimed.epsilon(1.0):.2f}")
        sigma 0.935: claimed 0.25, true 4.90

    ### Formal Guarantees
    None.
    """
    validate.positive("epsilon", epsilon)
    validate.probability("delta", delta)
    if validate.finite("dimension", dimension) < 2:
        raise ValueError(f"Expected dimension >= 2, got dimension={dimension!r}.")
    ratio = validate.positive("batch_clip", batch_clip) / validate.positive("clip", clip)

    def excess(sigma: float) -> float:
        return _claimed_delta(epsilon, sigma, float(dimension), ratio) - delta

    tried = np.geomspace(_SMALLEST, _LARGEST, _POINTS)
    above = [index for index, sigma in enumerate(tried) if excess(sigma) > 0]
    if not above or above[-1] + 1 == _POINTS:
        raise ValueError(
            f"Expected a noise multiplier between {_SMALLEST:g} and {_LARGEST:g}, found none for "
            f"epsilon={epsilon}, delta={delta}, dimension={dimension}, batch_clip/clip={ratio:g}."
        )
    return float(optimize.brentq(excess, tried[above[-1]], tried[above[-1] + 1]))


def _claimed_delta(epsilon: float, sigma: float, dimension: float, ratio: float) -> float:
    """The left side of equation 25, for c = 1 and c′ = `ratio`."""
    mean_1, deviation_1 = _lognormal(sigma, dimension, ratio)
    mean_2, deviation_2 = _lognormal(sigma, dimension, 1 + ratio)
    first = special.log_ndtr(deviation_1 / 2 + (mean_1 - epsilon) / deviation_1)
    mean_2 -= 1 / sigma**2
    second = epsilon + special.log_ndtr(deviation_2 / 2 + (mean_2 - epsilon) / deviation_2)
    return float(math.exp(first) - math.exp(second))


def _lognormal(sigma: float, dimension: float, product: float) -> tuple[float, float]:
    """−log(1 + (d−1)·e^−x) with x = d·product/((d−1)·σ²), and σ_Z of equation 26."""
    exponent = -dimension * product / ((dimension - 1) * sigma**2)
    once = np.logaddexp(0, math.log(dimension - 1) + exponent)
    twice = np.logaddexp(0, math.log(dimension - 1) + 2 * exponent)
    log_variance = twice - 2 * once + _log_expm1(1 / sigma**2)
    return -float(once), math.sqrt(float(np.logaddexp(0, log_variance)))


def _log_expm1(value: float) -> float:
    return value + math.log(-math.expm1(-value))


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
