"""The search for the smallest noise that meets a budget, for a plan or for a selection.

ε falls about as a power of the noise, so its logarithm is interpolated, and halving is what is left
where that does not help. Whether a noise meets the budget is always evaluated, never interpolated.

A budget that no noise can meet is refused before the search.
"""

import math
import warnings
from collections.abc import Callable, Sequence

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.mechanisms import Release
from dp_sparse.sampling import Sampling

FINE, COARSE = 1e-4, 1e-3  # intervals of the privacy loss; the accountant rounds pessimistically
LIMITS = (1e-2, 1e4)  # of the noise multiplier
_UPWARDS = LIMITS[0], math.inf
_TOLERANCE = 1e-4
_FAR = 4.0  # the most by which the noise changes in one step outwards, a factor

Epsilon = Callable[[float], float]  # of a noise; it does not grow with the noise
_Point = tuple[float, float]  # a noise, and its log(ε / budget), positive if it does not meet it


def smallest_meeting(
    epsilon: Epsilon, budget: float, start: float, *, limits: _Point, relative: bool = False
) -> float:
    """The smallest noise whose ε is at most `budget`, rounded to a noise for which it is.

    Args:
        epsilon: Of a noise; about five evaluations of a smooth one are enough.
        budget: The most that ε may be.
        start: The noise to begin with.
        limits: The least noise and the most noise to try.
        relative: Whether the error is at most 1e-4 of the answer, instead of 1e-4.

    Returns:
        The noise, at least the least one; infinite if the most noise does not meet the budget.
    """

    def width(noise: float) -> float:
        return _TOLERANCE * noise if relative else _TOLERANCE

    def at(noise: float) -> _Point:
        return noise, _excess(epsilon(noise), budget)

    low, high = _around(at, start, limits, width)
    before, last = [math.inf] * 3, None
    while high[0] - low[0] > width(low[0]):
        stalled = high[0] - low[0] > before[-3] / 2
        before.append(high[0] - low[0])
        found = at(_between(low, high, width(low[0]) / 2, stalled))
        meets = found[1] <= 0
        low, high = (low, found) if meets else (found, high)
        if meets is last:  # the other end would stay for ever: bring the next guess nearer to it
            low, high = (_halved(low), high) if meets else (low, _halved(high))
        last = meets
    return high[0]


def smallest_noise_multiplier(epsilon: Callable[[float, float], float], budget: float) -> float:
    """The smallest one whose ε is at most `budget`, to 1e-4 above it; `LIMITS[1]` must meet it.

    A coarse search (pessimistic, ten times faster), then a fine one from its answer.

    Args:
        epsilon: Of a noise multiplier, from losses on a grid of some interval.
        budget: The most that ε may be.
    """
    coarse, _ = rough_noise_multiplier(epsilon, budget)
    return smallest_meeting(lambda sigma: epsilon(sigma, FINE), budget, coarse, limits=_UPWARDS)


def rough_noise_multiplier(
    epsilon: Callable[[float, float], float], budget: float
) -> tuple[float, float]:
    """As `smallest_noise_multiplier`, from coarse losses alone; with the ε that they give it."""
    sigma = smallest_meeting(lambda s: epsilon(s, COARSE), budget, 1.0, limits=_UPWARDS)
    return sigma, epsilon(sigma, COARSE)


def _excess(epsilon: float, budget: float) -> float:
    """log(ε / budget) within ±log(`_FAR`), positive exactly if ε is not at most the budget."""
    ratio = epsilon / budget
    if epsilon <= budget:
        return math.log(max(ratio, 1 / _FAR))
    if math.isnan(ratio):  # what cannot be computed meets no budget
        return math.log(_FAR)
    return math.log(min(ratio, _FAR)) or math.ulp(1.0)


def _around(
    at: Callable[[float], _Point], start: float, limits: _Point, width: Callable[[float], float]
) -> tuple[_Point, _Point]:
    """A noise that does not meet the budget and one that does, twice the same at a limit."""
    here, eager = at(start), 1.25  # a step goes a bit beyond where ε ~ 1 / noise meets the budget
    while True:
        noise, excess = here
        if noise == (limits[1] if excess > 0 else limits[0]):
            return ((math.inf, 0.0),) * 2 if excess > 0 else (here, here)
        step = min(max(eager * abs(excess), 2 * math.log1p(width(noise) / noise)), math.log(_FAR))
        wanted = noise * math.exp(math.copysign(step, excess))
        there = at(min(max(wanted, limits[0]), limits[1]))
        if (there[1] > 0) != (excess > 0):
            return (here, there) if excess > 0 else (there, here)
        here, eager = there, 2 * eager


def _halved(end: _Point) -> _Point:
    """An end with half its excess, towards which the next guess then moves (Illinois rule)."""
    return end[0], end[1] / 2


def _between(low: _Point, high: _Point, margin: float, stalled: bool) -> float:
    """Where log(ε / budget), linear in the logarithm of the noise, is 0; the middle if stalled.

    It keeps a margin to both ends: an answer next to one of them then ends the search.
    """
    part = 0.5 if stalled else low[1] / (low[1] - high[1])
    noise = low[0] * (high[0] / low[0]) ** part
    return min(max(noise, low[0] + margin), high[0] - margin)


def signal_to_noise(sampling: Sampling, noise_multiplier: float) -> float:
    """√T·B/σ: what all steps together move along one direction, over their noise along it.

    If every example's clipped gradient points there. No run has more.
    """
    return math.sqrt(sampling.steps) * sampling.expected_batch_size / noise_multiplier


def warn_if_hopeless(budget: PrivacyBudget, sampling: Sampling, noise_multiplier: float) -> None:
    """Warns if all steps together move less than their noise, even along a single direction.

    The signal to noise hardly depends on batch size and steps: it is N times what ε and δ allow an
    example to move, so below 1 nothing but more examples or a larger budget helps.
    """
    signal = signal_to_noise(sampling, noise_multiplier)
    if signal < 1:
        warnings.warn(
            f"No training can learn from num_examples={sampling.num_examples} at "
            f"epsilon={budget.epsilon:g} and delta={budget.delta:g}: with "
            f"noise_multiplier={noise_multiplier:.4g} the noise of all steps is {1 / signal:.3g} "
            "times what all examples together can move. More examples or a larger budget help; "
            "dp_sparse.plan_table compares batch sizes and epochs.",
            stacklevel=3,
        )


def refuse_infeasible(
    epsilon: Callable[[float, float], float],
    budget: PrivacyBudget,
    sampling: Sampling,
    releases: Sequence[Release],
) -> None:
    """Raises ValueError if even the most noise spends more than the budget.

    Warns if a part of the budget is out of reach, since batches beyond the capacity take all of δ.

    Args:
        epsilon: Of a noise multiplier and an interval, for all steps and releases together.
        budget: What they may spend.
        sampling: Of the steps.
        releases: What is released beside them.
    """
    if math.isinf(budget.epsilon):
        raise ValueError(
            "Expected a plan with an epsilon, got one of not_private_plan, which needs no "
            "calibration: calibrate the one that it is made of."
        )
    if sampling.overflow_delta(0.0, sampling.steps) >= budget.delta:
        raise ValueError(
            f"Batches beyond capacity={sampling.batch_capacity} alone exceed "
            f"delta={budget.delta:g} at every epsilon. Raise sampling.capacity."
        )
    if sampling.overflow_delta(budget.epsilon, sampling.steps) >= budget.delta:
        warnings.warn(
            f"Batches beyond capacity={sampling.batch_capacity} alone exceed "
            f"delta={budget.delta:g} at epsilon={budget.epsilon:g}, so the plan gets the noise of "
            "a smaller epsilon. Raise sampling.capacity to use all of it.",
            stacklevel=4,
        )
    if not epsilon(LIMITS[1], COARSE) <= budget.epsilon:
        names = [release.name for release in releases]
        raise ValueError(
            f"No noise meets the budget: even noise_multiplier={LIMITS[1]:g} spends "
            f"more than epsilon={budget.epsilon:g} at delta={budget.delta:g}. Raise the "
            f"budget{f', or lower the cost of {names}' if names else ''}."
        )
