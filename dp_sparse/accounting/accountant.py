"""dp-accounting's accountant of privacy loss distributions, with some more events.

It also bounds the error of its own arithmetic: losses are rounded up by the most that float64 may
have lost (`privacy_loss.rounded_up`), and `composition`, which adds losses up, does the same.
"""

import functools
import math
from typing import Any

import attr
import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dp_sparse.accounting import privacy_loss
from dp_sparse.accounting.composition import composed
from dp_sparse.accounting.events import DeltaDpEvent, GumbelTopKDpEvent, PureDpEvent

_Own = DeltaDpEvent | GumbelTopKDpEvent | PureDpEvent
_SLACK = 1e-9  # by which ε is raised until its δ, a sum of positive terms, is low enough
_TRIALS = 1000  # after which no finite ε is stated; more than any error of rounding asks for


@functools.lru_cache(maxsize=1024)
def epsilon_of(event: dp_accounting.DpEvent, delta: float, interval: float) -> float:
    """ε of `event` at `delta`, from losses on a grid of `interval`; infinite without noise."""
    return accountant_of(event, interval).get_epsilon(delta)


@functools.lru_cache(maxsize=8)  # a composed loss takes some megabytes
def accountant_of(event: dp_accounting.DpEvent, interval: float) -> "Accountant":
    """An accountant that has composed `event` alone, from losses on a grid of `interval`."""
    accountant = Accountant(value_discretization_interval=interval)
    accountant.compose(event)
    return accountant


class Accountant(PLDAccountant):
    """An accountant that also knows Gumbel top-k, (ε, 0) and (0, δ), and sampled compositions.

    ### Formal Guarantees
    Neighbouring datasets differ by one example added or removed. Both directions are accounted, and
    the larger δ counts. Losses are rounded up to the grid, and probabilities by the most that
    float64 may have lost, so ε is never understated. An event without noise, or with a loss too
    large for the grid, makes ε infinite.
    """

    _pld: PrivacyLossDistribution

    @property
    def distribution(self) -> PrivacyLossDistribution:
        """The privacy loss of everything composed so far."""
        return self._pld

    def add(self, loss: PrivacyLossDistribution, count: int = 1) -> "Accountant":
        """Composes `count` mechanisms of this privacy loss."""
        self._pld = composed([(self._pld, 1), (loss, count)])
        return self

    def get_delta(self, target_epsilon: float) -> float:
        """δ at an ε; a sum of positive terms, rounded up."""
        points = max(self._pld._pmf_remove.size, self._pld._pmf_add.size)
        rounding = 1 + (2 * points + 2**14) * privacy_loss.UNIT
        return min(float(super().get_delta(target_epsilon)) * rounding, 1.0)

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """δ at each ε >= 0, float64 `[points]`, rounded up."""
        if self._contains_non_dp_event:
            return np.ones(len(epsilons))
        return privacy_loss.deltas(self._pld, epsilons)

    def get_epsilon(self, target_delta: float) -> float:
        """An ε whose δ is at most `target_delta`, the least of them up to rounding."""
        if self._contains_non_dp_event:
            return math.inf
        epsilon = privacy_loss.least_epsilon(self._pld, target_delta)
        for _ in range(_TRIALS):
            if not math.isfinite(epsilon) or self.get_delta(epsilon) <= target_delta:
                return epsilon
            epsilon += _SLACK * (1 + epsilon)
        return math.inf

    def _maybe_compose(self, event: dp_accounting.DpEvent, count: int, do_compose: bool) -> Any:
        if isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
            event.event, dp_accounting.ComposedDpEvent
        ):
            return self._maybe_compose_sampled(event, count, do_compose)
        if isinstance(event, _Own) and (not do_compose or _is_unbounded(event)):
            event = dp_accounting.NonPrivateDpEvent()  # a known event without a finite ε
        if isinstance(event, dp_accounting.GaussianDpEvent):
            sigma = event.noise_multiplier / math.sqrt(count)  # of all `count` together
            event, count = dp_accounting.GaussianDpEvent(sigma), 1
        loss = None
        if do_compose and not _is_degenerate(event):
            loss = _loss_of(event, self._value_discretization_interval)
        if loss is None:
            return super()._maybe_compose(event, count, do_compose)
        self.add(privacy_loss.rounded_up(loss), count)
        return None

    def _maybe_compose_sampled(
        self, event: dp_accounting.PoissonSampledDpEvent, count: int, do_compose: bool
    ) -> Any:
        """Several releases from one sample: composes them, then accounts for the sampling."""
        interval = self._value_discretization_interval
        inner = Accountant(value_discretization_interval=interval)
        error = inner._maybe_compose(event.event, 1, do_compose)
        if error is not None or not do_compose:
            return error
        self._contains_non_dp_event |= inner._contains_non_dp_event
        loss = privacy_loss.sampled(inner.distribution, event.sampling_probability, interval)
        self.add(privacy_loss.rounded_up(loss), count)
        return None


def _is_unbounded(event: _Own) -> bool:
    if isinstance(event, DeltaDpEvent):
        return event.delta >= 1
    if isinstance(event, PureDpEvent):
        return event.epsilon > privacy_loss.LARGEST
    return privacy_loss.is_unbounded(event)


def _is_degenerate(event: dp_accounting.DpEvent) -> bool:
    """Whether a number of the event is 0: it has no noise, or never runs."""
    values = attr.astuple(event, recurse=False)
    inner = [value for value in values if isinstance(value, dp_accounting.DpEvent)]
    return any(isinstance(value, int | float) and value == 0 for value in values) or any(
        _is_degenerate(value) for value in inner
    )


def _loss_of(event: dp_accounting.DpEvent, interval: float) -> PrivacyLossDistribution | None:
    """The privacy loss of one mechanism on a grid; None for an event made of other events."""
    on = {"value_discretization_interval": interval}
    match event:
        case GumbelTopKDpEvent():
            return privacy_loss.gumbel_loss(event, interval)
        case PureDpEvent():
            return privacy_loss.of_pure(event.epsilon, interval)
        case DeltaDpEvent():
            return privacy_loss.of_delta(event.delta, interval)
        case dp_accounting.GaussianDpEvent():
            return privacy_loss.gaussian_loss(event.noise_multiplier, 1.0, interval)
        case dp_accounting.LaplaceDpEvent():
            return pld.from_laplace_mechanism(event.noise_multiplier, **on)
        case dp_accounting.PoissonSampledDpEvent(event=dp_accounting.GaussianDpEvent()):
            probability, sigma = event.sampling_probability, event.event.noise_multiplier
            return privacy_loss.gaussian_loss(sigma, probability, interval)
        case dp_accounting.PoissonSampledDpEvent(event=dp_accounting.LaplaceDpEvent()):
            probability, scale = event.sampling_probability, event.event.noise_multiplier
            return pld.from_laplace_mechanism(scale, sampling_prob=probability, **on)
        case dp_event.DiscreteLaplaceDpEvent():
            return pld.from_discrete_laplace_mechanism(
                event.noise_parameter, event.sensitivity, **on
            )
        case dp_event.MixtureOfGaussiansDpEvent():
            return pld.from_mixture_gaussian_mechanism(*attr.astuple(event, recurse=False), **on)
        case dp_accounting.TruncatedSubsampledGaussianDpEvent():
            return pld.from_truncated_subsampled_gaussian_mechanism(
                *attr.astuple(event, recurse=False), **on
            )
    return None
