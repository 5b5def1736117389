"""Noise sources: which noise a selection adds to its counts. There are four.

- `PublicRows`: no noise and no cost, for public data only;
- `GaussianTopK`: N(0, (noise_multiplier·√p)²) on every count, one Gaussian mechanism for any p;
- `GumbelTopK`: Gumbel(scale) on every count; `accounting.privacy_loss` says what it costs;
- `LaplaceTopK`: Laplace(scale) on every count, p Laplace mechanisms, pure DP of ε = p/scale.

p is the most counts that one example takes part in, over all tables: 1 for each one-hot table, and
`max_lookups` for each table of which an example looks up several rows. The rows with the largest
noisy counts are a post-processing of the noisy histogram (with Gumbel noise, also of k exponential
mechanisms).

### Formal Guarantees
Neighbouring datasets differ by one example added, removed or zeroed out (replaced by padding, which
counts nothing). It changes at most p counts, each by 1 and all in one direction: sensitivity √p in
L2, p in L1. The numbers of rows, `max_lookups`, k and the kind of noise are public.

The largest of n independent noise values without drawing all n, and secret randomness.

With F the distribution function, `log F` of the largest of n draws is −E/n for a standard
exponential E, and of the next ones, given it, −E/(n−1), −E/(n−2), … more (Rényi's representation).
So the k largest cost O(k) time and memory for any n, with exactly the joint distribution of drawing
all of them. Probabilities are kept as (tail, side), with full relative precision on both sides.

### Formal Guarantees
Keys are 128 bits of `os.urandom`, used once. A value takes 64 random bits: a side, and the tail
(k + ½)·2⁻⁶⁴ beyond the value on that side. Philox is not a cryptographic generator.
"""

import abc
import dataclasses
import math
import os

import dp_accounting
import numpy as np
import scipy.special

from dp_sparse.accounting import GumbelTopKDpEvent
from dp_sparse.core import Registered, validate

_SMALLEST_SCALE = 0.01  # below it ε0 > 100, which is no privacy


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


def gaussian_values(count: int) -> np.ndarray:
    """Independent standard normal values, float64 `[count]`, by a fresh secret key."""
    return GaussianTopK(1.0).quantiles(random_quantiles(count, secret_generator()))


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


class NoiseSource(Registered, abc.ABC):
    """The noise on counts, and what it costs; a subclass is a frozen dataclass of one number."""

    @abc.abstractmethod
    def scale_of(self, lookups: int) -> float:
        """The factor of a standard noise value, if one example has at most `lookups` counts."""

    @abc.abstractmethod
    def quantiles(self, levels: Quantile) -> np.ndarray:
        """Standard noise values at these levels, float64 of the same shape."""

    @abc.abstractmethod
    def event(self, lookups: int, selected: int) -> dp_accounting.DpEvent:
        """What a selection costs.

        Args:
            lookups: p >= 1, the most counts that one example takes part in.
            selected: Rows selected by their noisy counts, over all tables.
        """

    @abc.abstractmethod
    def description(self, lookups: int) -> str:
        """The noise, in the words of the statement."""


@dataclasses.dataclass(frozen=True)
class PublicRows(NoiseSource):
    """No noise: for public data, such as a token list or an earlier public period.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> public_examples = {"users": np.array([3, 3, 7])}, np.ones(3)
        >>> rows = dp_sparse.select_top_k(
        ...     public_examples, {"users": 10}, k=1, source=dp_sparse.PublicRows(), progress=False
        ... )
        >>> rows.row_ids["users"], rows.costs
        (array([3]), False)

    ### Formal Guarantees
    None: the selected rows must not depend on private examples.
    """

    def scale_of(self, lookups: int) -> float:
        """0."""
        del lookups
        return 0.0

    def quantiles(self, levels: Quantile) -> np.ndarray:
        """0."""
        return np.zeros(levels.tail.shape)

    def event(self, lookups: int, selected: int) -> dp_accounting.DpEvent:
        """No cost."""
        del lookups, selected
        return dp_accounting.NoOpDpEvent()

    def description(self, lookups: int) -> str:
        """No noise."""
        del lookups
        return "public, at no cost"


@dataclasses.dataclass(frozen=True)
class GaussianTopK(NoiseSource):
    """One noisy histogram over all tables, of standard deviation noise_multiplier·√p.

    The recommended one: composed with training, its noise has the smallest deviation at equal cost.

    Attributes:
        noise_multiplier: Standard deviation over the histogram's L2 sensitivity √p; > 0.

    Examples:
        >>> import dp_sparse
        >>> source = dp_sparse.GaussianTopK(noise_multiplier=10.0)  # for `select_top_k`
        >>> source.description(lookups=4)
        'Gaussian noise of standard deviation 20 on each count'

    ### Formal Guarantees
    One Gaussian mechanism of that noise multiplier.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        value = validate.positive("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", value)

    def scale_of(self, lookups: int) -> float:
        """The standard deviation, noise_multiplier·√p."""
        return self.noise_multiplier * math.sqrt(lookups)

    def quantiles(self, levels: Quantile) -> np.ndarray:
        """Normal quantiles."""
        return _signed(-scipy.special.ndtri(levels.tail), levels)

    def event(self, lookups: int, selected: int) -> dp_accounting.DpEvent:
        """A Gaussian mechanism."""
        del selected
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def description(self, lookups: int) -> str:
        """The deviation."""
        return f"Gaussian noise of standard deviation {self.scale_of(lookups):.4g} on each count"


@dataclasses.dataclass(frozen=True)
class ScaledTopK(NoiseSource):
    """A noise source with one scale in counts, for any number of lookups of an example.

    Attributes:
        scale: b of the noise, in counts; >= 0.01.
    """

    scale: float

    def __post_init__(self) -> None:
        if validate.positive("scale", self.scale) < _SMALLEST_SCALE:
            raise ValueError(
                f"Expected scale >= {_SMALLEST_SCALE}, in counts, got scale={self.scale!r}."
            )
        object.__setattr__(self, "scale", float(self.scale))

    def scale_of(self, lookups: int) -> float:
        """The scale."""
        del lookups
        return self.scale

    def description(self, lookups: int) -> str:
        """The scale."""
        del lookups
        name = type(self).__name__.removesuffix("TopK")
        return f"{name} noise of scale {self.scale:.4g} on each count"


@dataclasses.dataclass(frozen=True)
class GumbelTopK(ScaledTopK):
    """One-shot Gumbel top-k (the paper's Algorithm 2), with another accounting: not (ε, 0)-DP.

    Attributes:
        scale: b = 1/ε0 of the noise, in counts; >= 0.01. The paper's ε/p for each of p features is
            a scale of p/ε.

    Examples:
        >>> import dp_sparse
        >>> source = dp_sparse.GumbelTopK(scale=40.0)  # for `select_top_k`
        >>> source.description(lookups=4)
        'Gumbel noise of scale 40 on each count'

    ### Formal Guarantees
    See `dp_sparse.accounting.privacy_loss`.
    """

    def quantiles(self, levels: Quantile) -> np.ndarray:
        """`−log(−log F)`."""
        return -np.log(-levels.log_probability)

    def event(self, lookups: int, selected: int) -> dp_accounting.DpEvent:
        """The smaller of the histogram's cost and that of peeling."""
        return GumbelTopKDpEvent(self.scale, lookups, selected)


@dataclasses.dataclass(frozen=True)
class LaplaceTopK(ScaledTopK):
    """One noisy histogram over all tables with Laplace noise, for pure differential privacy.

    Attributes:
        scale: b of the noise, in counts; >= 0.01.

    Examples:
        >>> import dp_sparse
        >>> source = dp_sparse.LaplaceTopK(scale=40.0)  # for `select_top_k`
        >>> source.description(lookups=4)
        'Laplace noise of scale 40 on each count'

    ### Formal Guarantees
    (p/scale, 0)-DP. A plan accounts for it as p Laplace mechanisms, which is exact, and less than
    that for δ > 0.
    """

    def quantiles(self, levels: Quantile) -> np.ndarray:
        """Laplace quantiles."""
        return _signed(-np.log(2 * levels.tail), levels)

    def event(self, lookups: int, selected: int) -> dp_accounting.DpEvent:
        """One Laplace mechanism for each count of an example."""
        del selected
        return dp_accounting.SelfComposedDpEvent(dp_accounting.LaplaceDpEvent(self.scale), lookups)


def _signed(size: np.ndarray, levels: Quantile) -> np.ndarray:
    return np.where(levels.upper, size, -size)
