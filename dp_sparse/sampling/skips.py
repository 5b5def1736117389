"""Independent coin flips for many cells, as sorted positions of their heads: geometric skips.

The cost is that of the heads, whatever the number of cells.
"""

import math

import numpy as np


def bernoulli_positions(rng: np.random.Generator, probability: float, cells: int) -> np.ndarray:
    """Which of `cells` cells come up heads, each with `probability`; int64 sorted `[n]`.

    Gaps between heads are geometric, by inversion of float64 uniforms (k + ½)·2⁻⁵³.
    """
    if probability == 1:
        return np.arange(cells)
    expected = probability * cells
    chunk = int(expected + 8 * math.sqrt(expected) + 24)
    found: list[np.ndarray] = []
    last = -1
    while last < cells:
        found.append(last + np.cumsum(_gaps(rng, probability, chunk, cells)))
        last = int(found[-1][-1])
    positions = np.concatenate(found)
    return positions[positions < cells]


def _gaps(rng: np.random.Generator, probability: float, count: int, limit: int) -> np.ndarray:
    """Distances from one head to the next, int64 `[count]` in [1, limit + 1]."""
    uniform = (rng.integers(0, 2**53, count, dtype=np.int64) + 0.5) * 2.0**-53
    gaps = np.floor(np.log(uniform) / math.log1p(-probability))
    return 1 + np.minimum(gaps, limit).astype(np.int64)
