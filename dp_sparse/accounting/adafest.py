"""The formulas of DP-AdaFEST's noise and threshold (Ghazi et al. 2023, Algorithm 1)."""

import math

import scipy.stats

NOISE_RATIO, FALSE_ROWS = 1.0, 10.0  # best around Adagrad (docs/results/defaults.md)


def split_noise(noise_multiplier: float, ratio: float) -> tuple[float, float]:
    """σ1 = σ√(1 + r²) of the map and σ2 = σ√(1 + 1/r²) of the gradient, with `ratio` r = σ1/σ2.

    Both together cost what σ costs.
    """
    return noise_multiplier * math.sqrt(1 + ratio**2), noise_multiplier * math.sqrt(1 + ratio**-2)


def survival_probability(threshold: float, deviation: float) -> float:
    """p0 = Ψ(τ / s), the probability that a row that no example looked up survives.

    The noise has standard deviation s = σ1·C1.
    """
    return float(scipy.stats.norm.sf(threshold / deviation))


def default_threshold(expected_false_rows: float, num_rows: int, deviation: float) -> float:
    """τ for which `expected_false_rows` of c rows are expected to survive on noise alone.

    They are at most half of the rows.
    """
    return float(deviation * scipy.stats.norm.isf(min(expected_false_rows / num_rows, 0.5)))
