"""Privacy loss distributions from curves δ(ε), and those of Poisson-sampled mechanisms.

### Formal Guarantees
A pair of distributions whose curves are at or above a mechanism's, for an example removed and for
one added, dominates the mechanism, also in composition and under sampling (Zhu et al. 2022,
Theorems 10 and 11). True curves are convex in e^ε, so the lower convex hull of a bound is a bound,
and "connect the dots" turns it into a distribution on a grid, rounded pessimistically. The most
that float64 may have lost is added (`rounded_up`). O(grid points).
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import scipy.signal
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

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
    """Of the values from each index on, and 0 at the end."""
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
