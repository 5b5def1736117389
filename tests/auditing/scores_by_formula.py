"""Scores without a random number: quantiles of the normal distribution."""

import numpy as np
from scipy import stats


def held_in_and_out(count_in: int, count_out: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Those of canaries that were in are `shift` higher."""
    quantiles = [stats.norm.ppf((np.arange(n) + 0.5) / n) for n in (count_in, count_out)]
    return quantiles[0] + shift, quantiles[1]
