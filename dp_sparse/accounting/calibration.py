"""The search for the smallest noise multiplier that meets a condition."""

from collections.abc import Callable

FINE, COARSE = 1e-4, 1e-3  # intervals of the privacy loss; the accountant rounds pessimistically
LIMITS = (1e-2, 1e4)  # of the noise multiplier
_TOLERANCE = 1e-4

Meets = Callable[[float, float], bool]  # whether a noise multiplier does, at an interval


def smallest_noise_multiplier(meets: Meets) -> float:
    """The smallest one to 1e-4, on the side that meets the condition; `LIMITS[1]` must meet it.

    A coarse search (pessimistic, ten times faster), then a fine one around its answer.
    """
    low, high = 0.5, 1.0
    while not meets(high, COARSE):
        low, high = high, 2 * high
    while low > LIMITS[0] and meets(low, COARSE):
        low, high = low / 2, low
    _, high = _bisected(meets, low, high, COARSE)
    return _bisected(meets, *_bracket(meets, high), FINE)[1]


def _bracket(meets: Meets, start: float) -> tuple[float, float]:
    """One that does not meet the condition and one that does, from `start` on in growing steps."""
    step = _TOLERANCE
    if not meets(start, FINE):
        low, high = start, start + step
        while not meets(high, FINE):
            step *= 2
            low, high = high, high + step
        return low, high
    low, high = max(start - step, LIMITS[0] / 2), start
    while low > LIMITS[0] and meets(low, FINE):
        step *= 2
        low, high = max(low - step, LIMITS[0] / 2), low
    return low, high


def _bisected(meets: Meets, low: float, high: float, interval: float) -> tuple[float, float]:
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if meets(middle, interval) else (middle, high)
    return low, high
