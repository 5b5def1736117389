"""The largest of n independent noise values without drawing all n, and secret randomness.

With F the distribution function, `log F` of the largest of n draws is −E/n for a standard
exponential E, and of the next ones, given it, −E/(n−1), −E/(n−2), … more (Rényi's representation).
So the k largest cost O(k) time and memory for any n, with exactly the joint distribution of drawing
all of them. Probabilities are kept as (tail, side), with full relative precision on both sides.

### Formal Guarantees
Keys are 128 bits of `os.urandom`, used once. A value takes 64 random bits: a side, and the tail
(k + ½)·2⁻⁶⁴ beyond the value on that side. Philox is not a cryptographic generator.
"""

import dataclasses
import os

import numpy as np


@dataclasses.dataclass(frozen=True)
class Quantile:
    """Levels at which a distribution function is inverted.

    Attributes:
        tail: float64, each in (0, ½]: the probability beyond the value, on its own side.
        upper: bool, of the same shape: whether that side is above the value, else below.
    """

    tail: np.ndarray
    upper: np.ndarray

    @property
    def log_probability(self) -> np.ndarray:
        """`log F`, float64."""
        return np.where(self.upper, np.log1p(-self.tail), np.log(self.tail))


def secret_generator() -> np.random.Generator:
    """Philox with a fresh key from the operating system."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16), "little")))


def random_quantiles(count: int, rng: np.random.Generator) -> Quantile:
    """Independent uniform levels, `[count]`."""
    words = rng.integers(0, 2**64, count, dtype=np.uint64)
    tail = ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64
    return Quantile(tail, (words & np.uint64(1)).astype(bool))


def largest_quantiles(draws: int, count: int, rng: np.random.Generator) -> Quantile:
    """Levels of the `count` largest of `draws` independent values, `[count]`, decreasing.

    Args:
        draws: n >= count.
        count: k, how many levels to return.
        rng: Secret randomness.
    """
    exponentials = -random_quantiles(count, rng).log_probability
    log_probability = -np.cumsum(exponentials / (draws - np.arange(count)))
    survival = -np.expm1(log_probability)
    upper = survival <= 0.5
    return Quantile(np.where(upper, survival, np.exp(log_probability)), upper)


def distinct_integers(limit: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """A uniformly random set of `count` integers below `limit`, int64 `[count]`, in O(count)."""
    if 2 * count > limit:
        return rng.permutation(limit)[:count]
    found = np.zeros(0, np.int64)
    while len(found) < count:
        drawn = np.concatenate([found, rng.integers(0, limit, 2 * (count - len(found)) + 8)])
        _, first = np.unique(drawn, return_index=True)
        found = drawn[np.sort(first)][:count]
    return found
