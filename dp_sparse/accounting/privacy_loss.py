"""Privacy loss distributions from curves δ(ε), and those of Poisson-sampled mechanisms.

### Formal Guarantees
A pair of distributions whose curves are at or above a mechanism's, for an example removed and for
one added, dominates the mechanism, also in composition and under sampling (Zhu et al. 2022,
Theorems 10 and 11). True curves are convex in e^ε, so the lower convex hull of a bound is a bound,
and "connect the dots" turns it into a distribution on a grid, rounded pessimistically. The most
that float64 may have lost is added (`rounded_up`). O(grid points).

The privacy loss of a Gaussian mechanism on a Poisson sample, as dp-accounting's but faster.

dp-accounting finds the output at which the loss is ε for one ε of its grid after the other; here
all are found at once. A small error of such an output changes δ(ε) by its square alone: it is the
output at which the difference that makes δ(ε) is largest.

The privacy loss of one-shot Gumbel top-k.

The paper (Ghazi et al., NeurIPS 2023, B.1) says that its one-shot Gumbel top-k is (ε, 0)-DP. It is
not: its cost in pure DP is k·ε. Two bounds hold instead, with ε0 = 1 / scale:

- the noisy histogram itself: an example that adds 1 to m counts divides m exponential variables by
  e^ε0, so the privacy loss is that of a Gamma(m) variable (`histogram_delta`);
- peeling: Gumbel top-k equals k exponential mechanisms one after the other, each of range ε0 and so
  (ε0² / 8)-zCDP (Dong et al. 2020; Cesar and Rogers 2021), converted as in Canonne et al. 2020.

The mechanism's true curve δ(ε) is convex in e^ε and below both bounds. So it is below the convex
hull of their minimum, which `privacy_loss` turns into a distribution.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import scipy.signal
import scipy.special
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_pmf import PLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from dp_sparse.accounting.events import GumbelTopKDpEvent

LARGEST = 40.0  # losses beyond count as infinite
UNIT = 2.0**-53  # of rounding, in float64
_CURVE = 600 * UNIT, 4 * UNIT  # error of δ(ε), over P[loss >= ε], and for each unit of loss
_NEGLIGIBLE = 1e-18  # δ at which the grid of losses ends


def of_curves(removed: np.ndarray, added: np.ndarray, interval: float) -> PrivacyLossDistribution:
    """The losses whose δ(ε) are the lower hulls of two curves.

    Args:
        removed: δ at 0, 1, 2, … times `interval`, for an example removed.
        added: The same for one added.
        interval: Between two losses of the grid.
    """
    return PrivacyLossDistribution(
        _dominating(removed, added, interval), _dominating(added, removed, interval)
    )


def rounded_up(loss: PrivacyLossDistribution) -> PrivacyLossDistribution:
    """The same loss, with the most that rounding may have lost added to it.

    - δ(ε) = P[loss ≥ ε] − e^ε·Q[loss ≥ ε] is a difference: off by c = (600 + 4 L)·u of
      P[loss ≥ ε], with L the largest loss and u = 2⁻⁵³ (SciPy's distribution functions are within
      306 u, their logarithms within 2 u of themselves, of which none is below −L − 80). Since
      P[loss ≥ ε] ≤ δ(ε − h) / (1 − e^−h) on a grid of h, moving the part c / (1 − e^−h) of every
      probability up by h adds no less to δ.
    - Each probability of "connect the dots" is a difference of slopes, off by 8 u·P[loss ≥ ε].
    """
    removed = _rounded_up(loss._pmf_remove.to_dense_pmf())
    if loss._symmetric:
        return PrivacyLossDistribution(removed)
    return PrivacyLossDistribution(removed, _rounded_up(loss._pmf_add.to_dense_pmf()))


def _rounded_up(pmf: pld_pmf.DensePLDPmf) -> pld_pmf.DensePLDPmf:
    largest = pmf._discretization * (pmf._lower_loss + pmf.size)
    error = _CURVE[0] + _CURVE[1] * max(largest, 0.0)
    larger = error / -math.expm1(-pmf._discretization)
    probabilities = np.append(pmf._probs, 0.0)
    probabilities += 8 * UNIT * (pmf._infinity_mass + _sums_from(pmf._probs))
    probabilities[1:] += larger * pmf._probs
    infinite = pmf._infinity_mass * (1 + larger)
    return pld_pmf.DensePLDPmf(pmf._discretization, pmf._lower_loss, probabilities, infinite, True)


def of_pure(epsilon: float, interval: float) -> PrivacyLossDistribution:
    """The loss of randomised response, which dominates every (ε, 0)-private mechanism."""
    losses = interval * np.arange(2 + math.ceil(epsilon / interval))
    below = np.maximum(-np.expm1(losses - epsilon), 0)  # (e^ε − e^loss) / e^ε
    curve = below / (1 + math.exp(-epsilon))
    return of_curves(curve, curve, interval)


def of_delta(delta: float, interval: float) -> PrivacyLossDistribution:
    """The loss that is infinite with probability `delta` and else 0: of (0, δ)-privacy."""
    return PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(interval, 0, np.array([1 - delta]), delta, True)
    )


def sampled(
    loss: PrivacyLossDistribution, probability: float, interval: float
) -> PrivacyLossDistribution:
    """The loss of a mechanism on a Poisson sample of the data.

    With (P, Q) the pair of `loss` and P' = (1 − q)·Q + q·P (Zhu et al. 2022, Theorem 11):
    `δ(P'‖Q)(ε) = q·δ(P‖Q)(log(1 + (e^ε − 1)/q))` for an example removed, and for one added
    `δ(Q‖P')(ε) = (1 − e^ε·(1 − q))·δ(Q‖P)(log(q·e^ε / (1 − e^ε·(1 − q))))`, or 0 once e^ε·(1 − q)
    reaches 1.

    Args:
        loss: The loss of the mechanism on all of its input, for add or remove.
        probability: q in (0, 1], the probability of each example to be in the sample.
        interval: The grid of `loss` and of the result.
    """
    of_removed, of_added = loss._pmf_remove, loss._pmf_add
    largest = max(
        largest_relevant(functools.partial(_finite_delta, pmf)) for pmf in (of_removed, of_added)
    )
    points = 1 + math.ceil(math.log1p(probability * math.expm1(largest)) / interval)
    losses = interval * np.arange(points)
    removed = probability * _delta(of_removed, np.log1p(np.expm1(losses) / probability))
    with np.errstate(divide="ignore"):
        rest = -np.expm1(losses + np.log1p(-probability))  # 1 − e^ε·(1 − q), without cancellation
    reached = rest > 0
    own = np.log(probability) + losses[reached] - np.log(rest[reached])
    added = np.zeros(points)
    added[reached] = rest[reached] * _delta(of_added, np.maximum(own, 0))
    return of_curves(removed, added, interval)


def deltas(loss: PrivacyLossDistribution, epsilons: np.ndarray) -> np.ndarray:
    """δ at each ε in [0, `LARGEST`], of the worse direction, float64 `[points]`, rounded up."""
    return np.maximum(_delta(loss._pmf_remove, epsilons), _delta(loss._pmf_add, epsilons))


def least_epsilon(loss: PrivacyLossDistribution, delta: float) -> float:
    """The least ε >= 0 whose δ, of the worse direction, is `delta`, up to rounding; or infinity."""
    return max(_least_epsilon(pmf, delta) for pmf in (loss._pmf_remove, loss._pmf_add))


def _least_epsilon(pmf: pld_pmf.PLDPmf, delta: float) -> float:
    dense = pmf.to_dense_pmf()
    if dense._infinity_mass > delta:
        return math.inf
    curve = _curve(dense)
    place = int(np.argmax(curve <= delta))  # δ at the largest loss is that of infinity
    if not place:
        return 0.0
    loss = dense._discretization * (dense._lower_loss + place - 1)
    from_before = math.expm1(-dense._discretization) if place > 1 else -1.0  # of e^ε, over e^loss
    part = (delta - curve[place]) / (curve[place - 1] - curve[place])  # δ is linear in e^ε
    return max(loss + math.log1p(part * from_before), 0.0)


def largest_relevant(delta: Callable[[np.ndarray], np.ndarray]) -> float:
    """ε from which on `delta`, of increasing ε, is negligible, rounded up; or `LARGEST`."""
    losses = np.geomspace(1e-6, LARGEST, 160)
    relevant = np.flatnonzero(delta(losses) >= _NEGLIGIBLE)
    last = relevant[-1] + 1 if relevant.size else 0
    return float(losses[min(last, len(losses) - 1)])


def _finite_delta(pmf: pld_pmf.PLDPmf, epsilons: np.ndarray) -> np.ndarray:
    """δ without what is infinite, which no ε is large enough for."""
    return _delta(pmf, epsilons) - pmf._infinity_mass


def _delta(pmf: pld_pmf.PLDPmf, epsilons: np.ndarray) -> np.ndarray:
    """`Σ_{loss > ε} p·(1 − e^(ε − loss))` at ε ≥ 0, what is infinite included, rounded up.

    Rounding ε by r moves δ by r·d log δ/dε, below 2¹⁴ u of itself; `_curve` adds 2n·u.
    """
    dense = pmf.to_dense_pmf()
    losses = dense._discretization * (dense._lower_loss + np.arange(dense.size))
    with np.errstate(over="ignore"):  # of losses far beyond every ε
        places = np.r_[0, np.exp(losses)]
    delta = np.interp(np.exp(epsilons), places, _curve(dense))
    return np.minimum(delta * (1 + (2 * dense.size + 2**14) * UNIT), 1)


def _curve(dense: pld_pmf.DensePLDPmf) -> np.ndarray:
    """δ at e^ε = 0 and at each of its losses, float64 `[1 + losses]`; linear in e^ε between them.

    From the largest loss down, `δ(ε − h) = (1 − e^−h)·P[loss ≥ ε] + e^−h·δ(ε)` adds positive terms
    alone, so n losses leave a relative error below 2n·u.
    """
    from_each = dense._infinity_mass + _sums_from(dense._probs)  # P[loss >= each], then infinity
    terms = -math.expm1(-dense._discretization) * from_each[:0:-1]
    terms[0] = dense._infinity_mass
    growth = math.exp(-dense._discretization)
    at_losses = scipy.signal.lfilter([1.0], [1.0, -growth], terms)[::-1]
    return np.r_[from_each[0], at_losses]


def _sums_from(values: np.ndarray) -> np.ndarray:
    """Sums of the values from each index on, and 0 at the end."""
    return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])


def _dominating(curve: np.ndarray, reverse: np.ndarray, interval: float) -> pld_pmf.PLDPmf:
    """The loss whose δ(ε) is the lower hull of `curve`.

    Its other half follows from the curve of the reverse: δ(−ε) = 1 − e^−ε + e^−ε·reverse(ε).
    """
    grid = np.arange(1 - len(curve), len(curve))
    losses = interval * grid[len(curve) :]
    mirrored = -np.expm1(-losses) + np.exp(-losses) * reverse[1:]
    delta = np.minimum(np.concatenate([mirrored[::-1], curve]), 1)
    kept = _lower_hull(np.exp(interval * grid), delta)
    return pld_pmf.create_pmf_pessimistic_connect_dots(interval, grid[kept], delta[kept])


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Indices of the points of the lower convex hull, for increasing x (monotone chain)."""
    slopes = np.diff(y) / np.diff(x)
    if np.all(slopes[1:] >= slopes[:-1]):
        return np.arange(len(x))
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    kept: list[int] = []
    for index, (right, right_y) in enumerate(points):
        while len(kept) > 1:
            (left, left_y), (middle, middle_y) = points[kept[-2]], points[kept[-1]]
            if (middle_y - left_y) * (right - left) < (right_y - left_y) * (middle - left):
                break  # below the chord of its neighbours
            kept.pop()
        kept.append(index)
    return np.array(kept)


def gaussian_loss(sigma: float, probability: float, interval: float) -> pld.PrivacyLossDistribution:
    """The losses of the Gaussian mechanism with noise `sigma` on a sample, for add and remove.

    Args:
        sigma: Noise over sensitivity, > 0.
        probability: q in (0, 1], the probability of each example to be in the sample.
        interval: Between two losses of the grid.
    """

    def one(adjacency: AdjacencyType) -> PLDPmf:
        return pld._create_pld_pmf_from_monotone_privacy_loss(
            _GaussianLoss(sigma, sampling_prob=probability, adjacency_type=adjacency),
            value_discretization_interval=interval,
            use_connect_dots=True,
        )

    return pld._pld_for_subsampled_mechanism(one, probability)


class _GaussianLoss(GaussianPrivacyLoss):
    """The loss for add or for remove, with δ of an array of ε at once."""

    def get_delta_for_epsilon(self, epsilons: np.ndarray) -> np.ndarray:
        """δ(ε) = P[output ≤ x] − e^ε·Q[output ≤ x], at the largest x whose loss is at least ε."""
        outputs = self._outputs(epsilons)
        lower = np.exp(epsilons + self.mu_lower_log_cdf(outputs))
        return np.clip(self.mu_upper_cdf(outputs) - lower, 0, 1)

    def _outputs(self, epsilons: np.ndarray) -> np.ndarray:
        """x of each ε: ∞ if the loss is nowhere below ε, −∞ if it nowhere reaches ε."""
        variance = self.standard_deviation**2
        if self.adjacency_type == AdjacencyType.REMOVE:
            return -0.5 - variance * _unsampled(epsilons, self.sampling_prob)
        return 0.5 + variance * _unsampled(-epsilons, self.sampling_prob)


def _unsampled(losses: np.ndarray, probability: float) -> np.ndarray:
    """`log(1 + (e^loss − 1) / q)`, −∞ where that has no logarithm; without overflow.

    For negative losses as `log((1 − q) / q) + log(e^(loss − log(1 − q)) − 1)`: 1 + (e^loss − 1) / q
    has few digits near the loss log(1 − q).
    """
    if probability == 1:
        return losses
    least = math.log1p(-probability)
    with np.errstate(divide="ignore"):
        beyond = np.log(np.expm1(np.maximum(np.minimum(losses, 0) - least, 0)))
        above = np.maximum(losses, 0)
        large = above + np.log1p((probability - 1) * np.exp(-above))
    return np.where(losses > 0, large, beyond + least) - math.log(probability)


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


def gumbel_loss(event: GumbelTopKDpEvent, interval: float) -> PrivacyLossDistribution:
    """The privacy loss distribution that dominates `event`, rounded pessimistically.

    Args:
        event: The selection.
        interval: Between two losses of the grid.
    """
    largest = largest_relevant(lambda losses: np.maximum(*_curves(event, losses)))
    points = 1 + math.ceil(largest / interval)
    return of_curves(*_curves(event, interval * np.arange(points)), interval)


def _curves(event: GumbelTopKDpEvent, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smaller bound at each of `losses`, for an example removed and for one added."""
    removed, added = histogram_delta(losses, event.scale, event.lookups)
    peeled = peeling_delta(losses, event.scale, event.selected)
    return np.minimum(removed, peeled), np.minimum(added, peeled)


def is_unbounded(event: GumbelTopKDpEvent) -> bool:
    """Whether losses beyond `privacy_loss.LARGEST` are so likely that ε counts as infinite."""
    return bool(np.maximum(*_curves(event, np.array([LARGEST])))[0] > 0.5)
