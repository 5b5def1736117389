"""Poisson sampling by its definition."""

import math

import numpy as np
from scipy import stats

# p, U → gap: the inverse of the geometric distribution, from derivation.
GAPS = [
    (0.3, {0.999999: 1, 0.9: 1, 0.5: 2, 0.1: 7, 1e-06: 39}),
    (0.01, {0.999999: 1, 0.9: 11, 0.5: 69, 0.1: 230, 1e-06: 1375}),
    (1e-05, {0.999999: 1, 0.9: 10536, 0.5: 69315, 0.1: 230258, 1e-06: 1381545}),
    (1e-09, {0.999999: 1001, 0.9: 105360516, 0.5: 693147181, 0.1: 2302585092, 1e-06: 13815510552}),
]


def geometric_gap(uniform: float, probability: float) -> int:
    """The smallest k ≥ 1 with (1 − p)^k < U: trials up to and with the first success."""
    return 1 + math.floor(math.log(uniform) / math.log1p(-probability))


def overflow_delta(
    num_examples: int, expected_batch_size: float, steps: int, capacity: int, epsilon: float
) -> float:
    """T·(1 + e^ε)·P[Bin(N, q) > capacity]."""
    beyond = stats.binom.sf(capacity, num_examples, expected_batch_size / num_examples)
    return float(steps * (1 + math.exp(epsilon)) * beyond)


def poisson_indices(rng: np.random.Generator, num_examples: int, probability: float) -> np.ndarray:
    """One coin for each example."""
    return np.flatnonzero(rng.random(num_examples) < probability)
