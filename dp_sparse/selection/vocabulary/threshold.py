"""The noise and the threshold of a private vocabulary, and what both cost.

Nobody knows beforehand which values a column has, so that a value occurs at all may tell of one
example. This is partition selection with Gaussian noise: each value with a vote gets noise on its
count, and is released, with its noisy count, if that exceeds a threshold T which a value of one
example alone hardly reaches (Korolova et al., WWW 2009; Gopi et al., ICML 2020). O(1).

### Formal Guarantees
A value is a pair of a column and what stands there. An example has a vote of 1 for each of its
distinct values, at most m of them. The noise of a count is N(0, s²) with s = σ·√m, rounded to a
whole number, and independent of that of other counts. Let D have one example more than D′ (or D′
padding in its place). The proof, and nothing else, divides the values of D in two:

- A, those that have a vote in D′, too. At most m of their counts differ, each by 1: one Gaussian
  mechanism of noise multiplier σ, of which comparing with T is post-processing.
- B, the k ≤ m values for which that one example alone votes. On D′ none of them is released. On D
  each has the count 1, and exceeds T, a whole number, if the noise is at least T − ½ before it is
  rounded: with a probability of at most t = Ψ((T − ½)/s). That one of the k does has a probability
  of at most 1 − (1 − t)^m. T is the smallest whole number for which this is at most δ_T:

      T = ⌈½ + s·Ψ⁻¹(1 − (1 − δ_T)^(1/m))⌉.

  So what is released of B has a total variation distance of at most δ_T between D and D′: it is
  (0, δ_T)-private, in both directions.

The noise of A and that of B are independent, so the vocabulary is a composition of a Gaussian
mechanism and a (0, δ_T)-private one. A plan adds the privacy losses of both to that of training. At
every ε the two together have δ(ε) ≤ δ_T + (1 − δ_T)·δ_Gauss(ε).

Noise has 64 random bits, for which t is larger by at most 2⁻⁶⁵; T leaves room for that.
"""

import dataclasses
import math
from collections.abc import Iterable

import dp_accounting
import scipy.special

from dp_sparse.accounting import DeltaDpEvent, Release
from dp_sparse.core import validate
from dp_sparse.selection.top_k.noise_sources import GaussianTopK

_NAME = "private vocabulary"
_OF_64_BITS = 2.0**-65


@dataclasses.dataclass(frozen=True)
class VocabularyNoise:
    """The noise of one vocabulary, and how likely it has a value of one example alone.

    Attributes:
        noise_multiplier: σ, the standard deviation of the noise over √m; > 0.
        delta: δ_T in (0, 1).

    ### Formal Guarantees
    See the module.
    """

    noise_multiplier: float
    delta: float

    def __post_init__(self) -> None:
        noise = validate.positive("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", noise)
        object.__setattr__(self, "delta", validate.probability("delta", self.delta))

    @property
    def source(self) -> GaussianTopK:
        """The distribution of the noise."""
        return GaussianTopK(self.noise_multiplier)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What the vocabulary costs, whatever m is."""
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        return dp_accounting.ComposedDpEvent((gaussian, DeltaDpEvent(self.delta)))

    @property
    def release(self) -> Release:
        """The release of a plan that pays for one vocabulary."""
        name = (
            f"{_NAME} (Gaussian noise multiplier {self.noise_multiplier:.4g}; probability of a "
            f"value that one example alone has: {self.delta:.3g})"
        )
        return Release(name, self.event)

    def threshold(self, max_values: int) -> int:
        """T, which the noisy count of a released value exceeds.

        Args:
            max_values: m.

        Raises:
            ValueError: δ_T over m is below what noise of 64 bits can promise.
        """
        tail = -math.expm1(math.log1p(-self.delta) / max_values) - _OF_64_BITS
        if tail <= 0:
            raise ValueError(
                f"Expected delta={self.delta:g} above 2**-65 for each of max_values={max_values}: "
                "lower max_values, or raise share of reserve_vocabulary."
            )
        deviations = -float(scipy.special.ndtri(tail))
        return math.ceil(0.5 + self.source.scale_of(max_values) * deviations)


def noise_paid_by(releases: Iterable[Release]) -> VocabularyNoise | None:
    """The noise of the vocabulary that releases of a plan pay for; None if they pay for none."""
    for release in releases:
        parts = getattr(release.event, "events", ())
        if release.name.startswith(_NAME):
            match [*parts]:
                case [dp_accounting.GaussianDpEvent() as gaussian, DeltaDpEvent() as failure]:
                    return VocabularyNoise(gaussian.noise_multiplier, failure.delta)
    return None
