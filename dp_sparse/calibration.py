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
    step = 0.01 * high
    while not meets(high, FINE):
        high += step
    low = high - step
    while low > LIMITS[0] and meets(low, FINE):
        low, high = low - step, low
    return _bisected(meets, low, high, FINE)[1]


def _bisected(meets: Meets, low: float, high: float, interval: float) -> tuple[float, float]:
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (low, middle) if meets(middle, interval) else (middle, high)
    return low, high
