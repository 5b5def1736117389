"""DP-FEST's selection, plain: counts by sets, noise on every row, Gumbel's cost by formula."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations

import numpy as np
from scipy import optimize, special

Sampler = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

STANDARD_NOISE: dict[str, Sampler] = {
    "gaussian": lambda rng, shape: rng.normal(size=shape),
    "gumbel": lambda rng, shape: rng.gumbel(size=shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
}


def count_rows(
    examples: Iterable[Sequence[int]], num_rows: int, max_lookups: int, padding_id: int | None
) -> list[int]:
    """How many examples look each row up, one example after the other."""
    counts = [0] * num_rows
    for ids in examples:
        distinct: list[int] = []
        for row in ids:
            if row != padding_id and row not in distinct:
                distinct.append(row)
        for row in distinct[:max_lookups]:
            counts[row] += 1
    return counts


def noisy_top_k(
    counts: Sequence[float], k: int, noise: Sampler, scale: float, runs: int, seed: int
) -> np.ndarray:
    """Which rows have the k largest noisy counts, bool `[runs, rows]`: noise on every row."""
    rng = np.random.default_rng(seed)
    noisy = np.asarray(counts, float) + scale * noise(rng, (runs, len(counts)))
    chosen = np.zeros(noisy.shape, bool)
    np.put_along_axis(chosen, np.argsort(-noisy, axis=1)[:, :k], True, axis=1)
    return chosen


def gumbel_subset_probability(counts: Sequence[float], rows: Sequence[int], scale: float) -> float:
    """The chance that Gumbel noise selects exactly `rows`: k exponential mechanisms in a row."""
    weights = np.exp(np.asarray(counts, float) / scale)
    total = 0.0
    for order in permutations(rows):
        left, chance = weights.sum(), 1.0
        for row in order:
            chance *= weights[row] / left
            left -= weights[row]
        total += chance
    return total


def gumbel_deltas(epsilon: float, e0: float, m: int) -> tuple[float, float]:
    """δ(ε) of m counts under Gumbel(1/e0) noise: (one example less, one example more)."""
    t = (epsilon + m * e0) / (math.exp(e0) - 1)
    s = (m * e0 - epsilon) / (math.exp(e0) - 1)
    more = special.gammaincc(m, t) - math.exp(epsilon) * special.gammaincc(m, math.exp(e0) * t)
    less = special.gammainc(m, math.exp(e0) * max(s, 0)) - math.exp(epsilon) * special.gammainc(
        m, max(s, 0)
    )
    return (less if s > 0 else 0.0), more


def zcdp_delta(epsilon: float, rho: float) -> float:
    """The smallest δ that ρ-zCDP gives at ε, over all orders α > 1."""

    def log_delta(log_order: float) -> float:
        alpha = 1 + math.exp(log_order)
        return (
            (alpha - 1) * (alpha * rho - epsilon)
            - math.log(alpha - 1)
            + alpha * math.log1p(-1 / alpha)
        )

    starts = np.linspace(-12, 20, 200)
    best = starts[np.argmin([log_delta(start) for start in starts])]
    found = optimize.minimize_scalar(log_delta, bounds=(best - 0.5, best + 0.5), method="bounded")
    return min(1.0, math.exp(found.fun))
