"""What some steps and all other releases of a plan cost together, at one noise multiplier."""

import dataclasses

import dp_accounting
import numpy as np

from dp_sparse.accounting.accountant import accountant_of
from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.calibration import FINE
from dp_sparse.accounting.failures import epsilon_beside_failures
from dp_sparse.accounting.mechanisms import Mechanism, beyond_reach
from dp_sparse.accounting.releases import Release
from dp_sparse.sampling import Sampling


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
