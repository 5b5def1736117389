"""The privacy loss of one-shot Gumbel top-k.

The paper (Ghazi et al., NeurIPS 2023, B.1) says that its one-shot Gumbel top-k is (ε, 0)-DP. It is
not: its cost in pure DP is k·ε. Two bounds hold instead, with ε0 = 1 / scale:

- the noisy histogram itself: an example that adds 1 to m counts divides m exponential variables by
  e^ε0, so the privacy loss is that of a Gamma(m) variable (`histogram_delta`);
- peeling: Gumbel top-k equals k exponential mechanisms one after the other, each of range ε0 and so
  (ε0² / 8)-zCDP (Dong et al. 2020; Cesar and Rogers 2021), converted as in Canonne et al. 2020.

The mechanism's true curve δ(ε) is convex in e^ε and below both bounds. So it is below the convex
hull of their minimum, which `privacy_loss` turns into a distribution.
"""

import math

import numpy as np
import scipy.special
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dp_sparse.accounting import privacy_loss
from dp_sparse.accounting.events import GumbelTopKDpEvent


def histogram_delta(
    epsilon: np.ndarray, scale: float, lookups: int
) -> tuple[np.ndarray, np.ndarray]:
    """δ(ε) of the whole noisy histogram, exact, for an example (removed, added).

    Added: `Q(m, t) − e^ε·Q(m, e^ε0·t)` with t = (ε + m·ε0) / (e^ε0 − 1); removed:
    `P(m, e^ε0·s) − e^ε·P(m, s)` with s = (m·ε0 − ε) / (e^ε0 − 1), 0 where s ≤ 0.

    Args:
        epsilon: float64, each >= 0.
        scale: b = 1 / ε0.
        lookups: m.
    """
    lower, upper = scipy.special.gammainc, scipy.special.gammaincc
    growth, shift = math.exp(1 / scale), lookups / scale
    sooner = np.maximum(shift - epsilon, 0) / math.expm1(1 / scale)
    later = (shift + epsilon) / math.expm1(1 / scale)
    removed = lower(lookups, growth * sooner) - np.exp(epsilon) * lower(lookups, sooner)
    added = upper(lookups, later) - np.exp(epsilon) * upper(lookups, growth * later)
    return np.clip(removed, 0, 1), np.clip(added, 0, 1)


def peeling_delta(epsilon: np.ndarray, scale: float, selected: int) -> np.ndarray:
    """δ(ε) of `selected` exponential mechanisms one after the other, by zCDP with ρ = k·ε0² / 8.

    `min over α of e^((α−1)(αρ−ε)) / (α−1) · (1−1/α)^α`; the minimum is where
    `(2α−1)ρ + log(1−1/α) = ε`, solved by interpolation (any α gives a bound).

    Args:
        epsilon: float64, each >= 0.
        scale: b = 1 / ε0.
        selected: k.
    """
    rho = selected / (8 * scale**2)
    orders = 1 + np.geomspace(1e-6, 1e9, 8192)
    stationary = (2 * orders - 1) * rho + np.log1p(-1 / orders)
    alpha = 1 + np.exp(np.interp(epsilon, stationary, np.log(orders - 1)))
    exponent = (alpha - 1) * (alpha * rho - epsilon) - np.log(alpha - 1)
    return np.exp(np.minimum(exponent + alpha * np.log1p(-1 / alpha), 0))


def loss_of(event: GumbelTopKDpEvent, interval: float) -> PrivacyLossDistribution:
    """The privacy loss distribution that dominates `event`, rounded pessimistically.

    Args:
        event: The selection.
        interval: Between two losses of the grid.
    """
    largest = privacy_loss.largest_relevant(lambda losses: np.maximum(*_curves(event, losses)))
    points = 1 + math.ceil(largest / interval)
    return privacy_loss.of_curves(*_curves(event, interval * np.arange(points)), interval)


def _curves(event: GumbelTopKDpEvent, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smaller bound at each of `losses`, for an example removed and for one added."""
    removed, added = histogram_delta(losses, event.scale, event.lookups)
    peeled = peeling_delta(losses, event.scale, event.selected)
    return np.minimum(removed, peeled), np.minimum(added, peeled)


def is_unbounded(event: GumbelTopKDpEvent) -> bool:
    """Whether losses beyond `privacy_loss.LARGEST` are so likely that ε counts as infinite."""
    return bool(np.maximum(*_curves(event, np.array([privacy_loss.LARGEST])))[0] > 0.5)
