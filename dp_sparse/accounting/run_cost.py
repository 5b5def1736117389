"""What some steps and all other releases of a plan cost together, at one noise multiplier.

A run may fail, by a batch beyond its capacity or by noise that ends too early: that costs δ, too.
"""

import dataclasses
import math
from collections.abc import Callable

import dp_accounting
import numpy as np

from dp_sparse.accounting.accountant import accountant_of, epsilon_of
from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.calibration import FINE
from dp_sparse.accounting.mechanisms import Mechanism, Release, beyond_reach
from dp_sparse.sampling import Sampling

_POINTS, _ROUNDS = 65, 4  # each round looks between two neighbours of the one before
_LARGEST = 600.0  # of ε, whose exponential is a number


def epsilon_beside_failures(
    event: dp_accounting.DpEvent,
    budget: PrivacyBudget,
    failure_delta: Callable[[float], float],
    interval: float,
) -> float:
    """ε of `event` at the budget's δ less what failures take of it; infinity if there is none.

    Args:
        event: What is released.
        budget: Its δ; and its ε, which is tried first. An answer below it need not be exact.
        failure_delta: What failures take of δ at an ε. It grows with ε, so the least ε is looked
            for at which both together are within δ; one evaluation takes some 0.1 ms.
        interval: The grid of the privacy loss distributions.
    """
    needed = failure_delta(budget.epsilon)
    if needed < budget.delta:
        epsilon = epsilon_of(event, budget.delta - needed, interval)
        if epsilon <= budget.epsilon:
            return epsilon
    if failure_delta(0.0) >= budget.delta:  # at every ε
        return math.inf
    low = epsilon_of(event, budget.delta, interval)
    if low == math.inf or failure_delta(low) >= budget.delta:
        return math.inf

    def together(epsilons: np.ndarray) -> np.ndarray:
        failures = np.array([failure_delta(epsilon) for epsilon in epsilons])
        return accountant_of(event, interval).deltas(epsilons) + failures

    return _least(together, low, _last(failure_delta, low, budget.delta), budget.delta)


def _last(failure_delta: Callable[[float], float], low: float, delta: float) -> float:
    """About the largest ε at which failures alone are within δ, as they are at `low`."""
    high = _LARGEST
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if failure_delta(middle) < delta else (low, middle)
    return low


def _least(
    deltas: Callable[[np.ndarray], np.ndarray], low: float, high: float, delta: float
) -> float:
    """About the least ε of [low, high] at which a curve that falls and then rises is within δ.

    Infinite if it is nowhere seen to be.
    """
    found = math.inf
    for _ in range(_ROUNDS):
        points = np.linspace(low, high, _POINTS)
        curve = deltas(points)
        place = int(np.argmax(curve <= delta))  # 0, too, if none is
        if curve[place] <= delta:
            found = float(points[place])
            low, high = points[max(place - 1, 0)], points[place]
        else:
            place = int(np.argmin(curve))
            low, high = points[max(place - 1, 0)], points[min(place + 1, _POINTS - 1)]
    return found


@dataclasses.dataclass(frozen=True)
class RunCost:
    """Steps of a plan's sampler and mechanism, beside its releases.

    Attributes:
        sampling: How the batches of the steps are drawn.
        mechanism: What one step releases.
        releases: What is released beside the steps.
        noise_multiplier: σ of a step.
        steps: How many.
    """

    sampling: Sampling
    mechanism: Mechanism
    releases: tuple[Release, ...]
    noise_multiplier: float
    steps: int

    @property
    def event(self) -> dp_accounting.DpEvent:
        """All of it, for the accountant."""
        events = [release.event for release in self.releases]
        if self.steps:
            one_step = self.mechanism.event(self.noise_multiplier)
            events.append(self.sampling.event(one_step, self.steps))
        return dp_accounting.ComposedDpEvent(tuple(events))

    def failure_delta(self, epsilon: float) -> float:
        """The part of δ for batches beyond the capacity and for noise that ends too early."""
        tail = self.sampling.participations(self.steps) * beyond_reach(self.noise_multiplier)
        return self.sampling.overflow_delta(epsilon, self.steps) + tail

    def epsilon(self, budget: PrivacyBudget, interval: float = FINE) -> float:
        """ε at the budget's δ; what is below the budget's ε need not be exact."""
        return epsilon_beside_failures(self.event, budget, self.failure_delta, interval)

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """δ at each ε >= 0, failures included, float64 `[points]`."""
        failures = [self.failure_delta(epsilon) for epsilon in epsilons]
        return accountant_of(self.event, FINE).deltas(epsilons) + np.array(failures)
