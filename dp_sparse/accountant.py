"""dp-accounting's accountant of privacy loss distributions, taught some more events."""

import functools
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dp_sparse import privacy_loss
from dp_sparse.events import GumbelTopKDpEvent, PureDpEvent
from dp_sparse.selection import gumbel


@functools.lru_cache(maxsize=1024)
def epsilon_of(event: dp_accounting.DpEvent, delta: float, interval: float) -> float:
    """ε of `event` at `delta`, from losses on a grid of `interval`; infinite without noise."""
    accountant = Accountant(value_discretization_interval=interval)
    accountant.compose(event)
    return float(accountant.get_epsilon(delta))


class Accountant(PLDAccountant):
    """Knows Gumbel top-k, pure privacy, and Poisson samples of compositions, too.

    ### Formal Guarantees
    Neighbouring datasets differ by one example added or removed; both directions are accounted and
    the larger δ counts. Losses are rounded up to the grid, so ε is never understated. What has no
    noise, or a loss too large for the grid, makes ε infinite.
    """

    _pld: PrivacyLossDistribution

    @property
    def distribution(self) -> PrivacyLossDistribution:
        """What has been composed so far."""
        return self._pld

    def _maybe_compose(self, event: dp_accounting.DpEvent, count: int, do_compose: bool) -> Any:
        if isinstance(event, GumbelTopKDpEvent):
            if do_compose and gumbel.is_unbounded(event):
                self._contains_non_dp_event = True
            elif do_compose:
                self._add(gumbel.loss_of(event, self._value_discretization_interval), count)
            return None
        if isinstance(event, PureDpEvent):
            if do_compose and event.epsilon > privacy_loss.LARGEST:
                self._contains_non_dp_event = True
            elif do_compose:
                interval = self._value_discretization_interval
                self._add(privacy_loss.of_pure(event.epsilon, interval), count)
            return None
        if isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
            event.event, dp_accounting.ComposedDpEvent
        ):
            return self._maybe_compose_sampled(event, count, do_compose)
        return super()._maybe_compose(event, count, do_compose)

    def _maybe_compose_sampled(
        self, event: dp_accounting.PoissonSampledDpEvent, count: int, do_compose: bool
    ) -> Any:
        """Several releases from one sample: their composition, then what sampling saves."""
        interval = self._value_discretization_interval
        inner = Accountant(value_discretization_interval=interval)
        error = inner._maybe_compose(event.event, 1, do_compose)
        if error is not None or not do_compose:
            return error
        self._contains_non_dp_event |= inner._contains_non_dp_event
        loss = privacy_loss.sampled(inner.distribution, event.sampling_probability, interval)
        self._add(loss, count)
        return None

    def _add(self, loss: PrivacyLossDistribution, count: int) -> None:
        self._pld = self._pld.compose(loss.self_compose(count))
