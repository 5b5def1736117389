"""Poisson sampling by its definition."""

import math

import numpy as np
from scipy import stats


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
