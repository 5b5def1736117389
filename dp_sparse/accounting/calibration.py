"""The search for the smallest noise that meets a condition, for a plan or for a selection."""

import math
from collections.abc import Callable

FINE, COARSE = 1e-4, 1e-3  # intervals of the privacy loss; the accountant rounds pessimistically
LIMITS = (1e-2, 1e4)  # of the noise multiplier
_TOLERANCE = 1e-4

Meets = Callable[[float], bool]  # whether a noise meets it; if one does, every larger one does


def smallest_meeting(
    meets: Meets,
    start: tuple[float, float],
    *,
    factor: float,
    limits: tuple[float, float],
    relative: bool = False,
) -> float:
    """The smallest noise that meets a condition, rounded to a noise that meets it.

    Args:
        meets: The condition, which holds from some noise on.
        start: Two noises to begin with, multiplied or divided until the answer is between them.
        factor: What they are multiplied or divided by.
        limits: The least noise and the most noise to try.
        relative: Whether the error is at most 1e-4 of the answer, instead of 1e-4.

    Returns:
        The noise; infinite if none up to the limit meets the condition.
    """
    low, high = start
    while not meets(high):
        low, high = high, factor * high
        if high > limits[1]:
            return math.inf
    while low > limits[0] and meets(low):
        low, high = max(low / factor, limits[0]), low
    return _bisected(meets, low, high, relative)


def smallest_noise_multiplier(meets: Callable[[float, float], bool]) -> float:
    """The smallest one that meets the condition, to 1e-4 above it; `LIMITS[1]` must meet it.

    A coarse search (pessimistic, ten times faster), then a fine one around its answer.

    Args:
        meets: Whether a noise multiplier meets the condition, at an interval of the privacy loss.
    """
    least = (LIMITS[0], math.inf)
    coarse = smallest_meeting(lambda s: meets(s, COARSE), (0.5, 1.0), factor=2, limits=least)

    def finely(noise_multiplier: float) -> bool:
        return meets(noise_multiplier, FINE)

    return _bisected(finely, *_around(finely, coarse))


def _around(meets: Meets, start: float) -> tuple[float, float]:
    """A noise that does not meet the condition and one that does, searched for from `start` on."""
    step = _TOLERANCE
    if not meets(start):
        low, high = start, start + step
        while not meets(high):
            step *= 2
            low, high = high, high + step
        return low, high
    low, high = max(start - step, LIMITS[0] / 2), start
    while low > LIMITS[0] and meets(low):
        step *= 2
        low, high = max(low - step, LIMITS[0] / 2), low
    return low, high


def _bisected(meets: Meets, low: float, high: float, relative: bool = False) -> float:
    while high - low > (_TOLERANCE * low if relative else _TOLERANCE):
        middle = (low * high) ** 0.5 if relative else (low + high) / 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high
