"""Families of claims: how much power a membership test may have, if the noise were smaller.

An audit rules claims out. A family has a claim for each `scale`: 1 is the one that is audited, at 2
half its noise, at ½ twice as much. The largest scale that is ruled out gives the bound on ε, by the
f-differential privacy of the family (Nasr et al., USENIX Security 2023, section 4).
"""

import abc
import functools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
from scipy import special

from dp_sparse.accounting import EPSILONS, PrivacyPlan, RunCost, true_positive_rate
from dp_sparse.core import validate

_MOST = 2.0**7  # times the claimed noise's inverse, and its inverse
_HALVINGS = 8
_LARGEST = 700.0  # ε whose exponential float64 holds


class TradeOff(abc.ABC):
    """A claim, and what it would be with other noise.

    Attributes:
        delta: δ at which ε is given.
    """

    delta: float

    @abc.abstractmethod
    def power(self, false_positive_rate: float, scale: float) -> float:
        """The highest true-positive rate of any membership test, in [0, 1]."""

    @abc.abstractmethod
    def epsilon(self, scale: float) -> float:
        """ε of this claim at its δ."""

    def lower_bound(self, rejects: Callable[[float], bool]) -> float:
        """ε of the strongest noise that is ruled out, 0 if none is; exact to 0.3 % of the noise.

        `rejects` says whether what was seen rules out the claim of a scale.
        It is above `epsilon(1.0)` if and only if the claim itself is ruled out.
        """
        low, high = _bracket(rejects)
        if not low:
            return 0.0
        for _ in range(_HALVINGS if high < math.inf else 0):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if rejects(middle) else (low, middle)
        claimed, shown = self.epsilon(1.0), self.epsilon(low)
        if low < 1:
            return min(shown, math.nextafter(claimed, 0.0))
        return max(shown, math.nextafter(claimed, math.inf))


def _bracket(rejects: Callable[[float], bool]) -> tuple[float, float]:
    """The last scale that is ruled out and the first that is not, of the powers of 2."""
    scale = 1.0
    if rejects(scale):
        while scale < _MOST and rejects(2 * scale):
            scale *= 2
        return scale, 2 * scale if scale < _MOST else math.inf
    while scale > 1 / _MOST and not rejects(scale / 2):
        scale /= 2
    return (scale / 2, scale) if scale > 1 / _MOST else (0.0, scale)


class EpsilonDeltaTradeOff(TradeOff):
    """The claims of any mechanism that is (ε, δ)-private, with one δ for all ε.

    Args:
        epsilon: ε of the claim.
        delta: δ >= 0.

    Examples:
        >>> from dp_sparse import auditing
        >>> claim = auditing.EpsilonDeltaTradeOff(epsilon=1.0, delta=0.0)
        >>> print(f"{claim.power(0.01, 1.0):.4f}")  # e times as much
        0.0272
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon = validate.positive("epsilon", epsilon)
        if not validate.is_weight(delta) or delta >= 1:
            raise ValueError(f"Expected 0 <= delta < 1, got delta={delta!r}.")
        self.delta = float(delta)

    def power(self, false_positive_rate: float, scale: float) -> float:
        """The least of e^ε·FPR + δ, 1 − e^−ε·(1 − FPR − δ) and 1."""
        epsilon = self.epsilon(scale)
        reverse = 1 - math.exp(-epsilon) * max(0.0, 1 - false_positive_rate - self.delta)
        return min(math.exp(epsilon) * false_positive_rate + self.delta, reverse)

    def epsilon(self, scale: float) -> float:
        """ε times `scale`."""
        return min(self._epsilon * scale, _LARGEST)


class GaussianTradeOff(TradeOff):
    """The claims of one Gaussian mechanism: μ = sensitivity over noise (Dong, Roth and Su 2022).

    Args:
        noise_multiplier: σ of the claim, in units of the sensitivity; of k runs on the same
            example σ/√k.
        delta: δ at which ε is given.

    Examples:
        >>> from dp_sparse import auditing
        >>> claim = auditing.GaussianTradeOff(noise_multiplier=1.0, delta=1e-5)
        >>> print(f"{claim.epsilon(1.0):.2f}, {claim.power(0.01, 1.0):.3f}")
        4.38, 0.092
    """

    def __init__(self, noise_multiplier: float, delta: float) -> None:
        self.noise_multiplier = validate.positive("noise_multiplier", noise_multiplier)
        self.delta = validate.probability("delta", delta)

    def power(self, false_positive_rate: float, scale: float) -> float:
        """Φ(Φ⁻¹(FPR) + μ)."""
        return float(
            special.ndtr(special.ndtri(false_positive_rate) + scale / self.noise_multiplier)
        )

    def epsilon(self, scale: float) -> float:
        """The exact ε of a Gaussian mechanism."""
        return float(dp_accounting.get_epsilon_gaussian(self.noise_multiplier / scale, self.delta))


class PlanTradeOff(TradeOff):
    """The claims of a plan: its sampler, steps and releases, with other noise multipliers.

    One scale takes as long as an ε of the plan, some tenths of a second.

    Args:
        plan: A calibrated plan that guarantees something.

    Raises:
        ValueError: It is none.

    Examples:
        >>> import dp_sparse
        >>> from dp_sparse import auditing
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling).calibrate()
        >>> claim = auditing.PlanTradeOff(plan)
        >>> print(f"{claim.epsilon(1.0):.2f}, {claim.epsilon(2.0):.2f}")  # with half the noise
        1.00, 2.15
    """

    def __init__(self, plan: PrivacyPlan) -> None:
        if not isinstance(plan, PrivacyPlan) or plan.noise_multiplier is None:
            raise ValueError(f"Expected a calibrated plan, got plan={plan!r}.")
        if plan.sampling.not_private_seed is not None:
            raise ValueError(
                "Expected a plan that guarantees something, got one of not_private_plan: there is "
                "no claim to audit."
            )
        self.plan, self.delta = plan, plan.for_all_steps.delta

    def power(self, false_positive_rate: float, scale: float) -> float:
        """As `plan.attack_power`, of the plan with σ over `scale`."""
        return true_positive_rate(EPSILONS, self._curve(scale), false_positive_rate)

    def epsilon(self, scale: float) -> float:
        """ε at the plan's δ, read off its curve; the plan's own at 1."""
        if scale == 1.0:
            return self.plan.spent(self.plan.sampling.steps).epsilon
        return _crossing(self._curve(scale), self.delta)

    def _curve(self, scale: float) -> np.ndarray:
        assert self.plan.noise_multiplier is not None
        return _deltas(self.plan.cost(self.plan.noise_multiplier / scale, self.plan.sampling.steps))


@functools.lru_cache(maxsize=1024)
def _deltas(cost: RunCost) -> np.ndarray:
    """δ at each of `EPSILONS`; audits of one plan ask for the same ones."""
    return cost.deltas(EPSILONS)


def _crossing(deltas: np.ndarray, delta: float) -> float:
    """The least ε at which a curve over `EPSILONS` is at δ; the largest of them if it never is.

    Between two points log δ is taken to fall linearly. Failures let a curve rise again at large ε.
    """
    met = np.flatnonzero(deltas <= delta)
    if not len(met):
        return float(EPSILONS[-1])
    first = int(met[0])
    if not first or deltas[first] <= 0:
        return float(EPSILONS[max(first - 1, 0)])
    above, below = np.log(deltas[first - 1]), np.log(deltas[first])
    part = (above - math.log(delta)) / (above - below)
    return float(EPSILONS[first - 1] + part * (EPSILONS[first] - EPSILONS[first - 1]))
