"""What one step releases of its batch, as events of the accountant.

It also has the formulas of DP-AdaFEST's noise and threshold (Ghazi et al. 2023, Algorithm 1), and
the releases besides training, with their cost.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import dp_accounting
import numpy as np
import scipy.special
import scipy.stats

from dp_sparse.accounting.events import PureDpEvent, checked_event, event_config, event_from_config
from dp_sparse.core import Registered, validate
from dp_sparse.noise import REACH
from dp_sparse.sampling import Sampling

_NEGLIGIBLE = 1e-6  # the share of δ that windows may add without being counted
LEAST_WINDOWS = 4  # of a run, where their length is proposed
NOISE_RATIO, FALSE_ROWS = 2.0, 10.0  # best around Adam (docs/results/defaults.md)


@dataclasses.dataclass(frozen=True)
class Mechanism(Registered, abc.ABC):
    """A step's releases; `calibrate` finds their one free number, the noise multiplier."""

    @property
    def not_guaranteed(self) -> tuple[str, float] | None:
        """Who claims another ε of all steps without proof, and which; None if nobody does."""
        return None

    @abc.abstractmethod
    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one step on one batch."""

    @abc.abstractmethod
    def description(self, noise_multiplier: float) -> str:
        """A sentence for the statement."""


@dataclasses.dataclass(frozen=True)
class GaussianMechanism(Mechanism):
    """One step releases Gaussian noise on sums of clipped contributions of one batch.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling)
        >>> plan.mechanism  # the default
        GaussianMechanism()
        >>> plan.mechanism.event(2.0)
        GaussianDpEvent(noise_multiplier=2.0)

    ### Formal Guarantees
    Several Gaussian releases from one batch, of sensitivity Δ_m and standard deviation s_m, are one
    Gaussian mechanism of noise multiplier σ with σ⁻² = Σ_m (Δ_m / s_m)². Only σ enters the
    accounting; how an optimizer divides it among its releases does not matter.
    """

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one step on one batch."""
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def description(self, noise_multiplier: float) -> str:
        """A sentence for the statement."""
        return f"Each step is a Gaussian mechanism of noise multiplier {noise_multiplier:.6g}."


@dataclasses.dataclass(frozen=True)
class ExponentialSelection(Mechanism):
    """One step selects rows by exponential mechanisms, then releases Gaussian noise on them.

    With σ of the Gaussian, each of the k selections is (ε0, 0)-private with
    ε0 = 1 / (√k · noise_ratio · σ). To first order all k together then cost what a Gaussian
    mechanism of noise multiplier noise_ratio · σ costs. For `ExponentialSelectionOptimizer`.

    Attributes:
        rows_per_step: k > 0, over all tables together.
        noise_ratio: The noise multiplier of a Gaussian mechanism that costs what all k selections
            cost, divided by the σ of the gradients; > 0.

    Examples:
        >>> import dp_sparse
        >>> mechanism = dp_sparse.ExponentialSelection(rows_per_step=100)
        >>> mechanism.epsilon_per_row(noise_multiplier=2.0)
        0.05
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling, mechanism)

    ### Formal Guarantees
    Selecting k rows by Gumbel noise is k exponential mechanisms one after the other (Durfee and
    Rogers 2019). Each is (ε0, 0)-private, and so dominated by randomised response. They and the
    Gaussian mechanism see one batch: their privacy losses are composed first, and the amplification
    by sampling is applied to the composition.
    """

    rows_per_step: int
    noise_ratio: float = 1.0

    def __post_init__(self) -> None:
        rows = validate.positive_integer("rows_per_step", self.rows_per_step)
        object.__setattr__(self, "rows_per_step", rows)
        object.__setattr__(self, "noise_ratio", validate.positive("noise_ratio", self.noise_ratio))

    def epsilon_per_row(self, noise_multiplier: float) -> float:
        """ε0 of one selection."""
        return 1 / (math.sqrt(self.rows_per_step) * self.noise_ratio * noise_multiplier)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one step on one batch."""
        one = PureDpEvent(self.epsilon_per_row(noise_multiplier))
        rows = dp_accounting.SelfComposedDpEvent(one, self.rows_per_step)
        return dp_accounting.ComposedDpEvent(
            (rows, dp_accounting.GaussianDpEvent(noise_multiplier))
        )

    def description(self, noise_multiplier: float) -> str:
        """A sentence for the statement."""
        return (
            f"Each step has {self.rows_per_step} exponential mechanisms of epsilon "
            f"{self.epsilon_per_row(noise_multiplier):.4g} each, then a Gaussian one of noise "
            f"multiplier {noise_multiplier:.6g}."
        )


def beyond_reach(noise_multiplier: float) -> float:
    """The probability that a step's releases would be impossible without one of its examples.

    It is `Ψ(R − 1/σ)` with R = `noise.REACH`, up to which noise takes every value.

    ### Formal Guarantees
    An example of the batch moves the releases of a step by a_j deviations in coordinate j, and
    Σ a_j² ≤ 1/σ² over all releases. Beyond R its privacy loss may be infinite, with probability
    Σ_j (Ψ(R − a_j) − Ψ(R)). A term divided by a_j² grows with a_j from 1.6/R on, so the worst case
    of large terms is one coordinate that takes all of 1/σ. Small terms are at most e·φ(R)·a_j, less
    than 3·10⁻¹⁵·√d/σ over d of them. They are left out; from d = 10⁵ on, at σ = 1, they are the
    larger of the two.
    """
    return float(scipy.special.ndtr(1 / noise_multiplier - REACH))


def windows_beyond_reach(
    sampling: Sampling, window: int, noise_multiplier: float, ratio: float
) -> float:
    """The probability that windows of selection add to `beyond_reach` of an example's batches.

    Args:
        sampling: The sampler of the run.
        window: W, the most steps of a window; those that grow are counted as of W steps.
        noise_multiplier: σ.
        ratio: σ1/σ2.

    ### Formal Guarantees
    An example that joins m of the n rounds of a window (`Sampling.steps_per_round`) moves its sum
    by m/(√n·σ1) deviations. In a stream m = n, and at most as many windows as passes have the
    example; else m is binomial. `beyond_reach` is of map and gradient of a step together; what it
    counts beyond that of the gradient alone is taken off.
    """
    per_round, steps = sampling.steps_per_round, sampling.steps
    of_map, of_gradient = split_noise(noise_multiplier, ratio)
    windows = math.ceil(steps / window) + math.ceil(math.log2(window))
    passes = steps if per_round == 1 else math.ceil(sampling.participations(steps))
    rounds = min(window if per_round == 1 else (window - 2) // per_round + 2, passes)
    joined = np.arange(1, rounds + 1)
    if per_round == 1:
        times = windows * scipy.stats.binom.pmf(joined, rounds, sampling.participations(1))
    else:
        times = min(windows, passes) * (joined == rounds)
    beyond = scipy.special.ndtr(joined / (math.sqrt(rounds) * of_map) - REACH)
    counted = beyond_reach(noise_multiplier) - beyond_reach(of_gradient)
    return max(0.0, float(np.sum(times * beyond)) - sampling.participations(steps) * counted)


def longest_window(
    sampling: Sampling, window: int, noise_multiplier: float, ratio: float, delta: float
) -> int:
    """At most W, and so short that `windows_beyond_reach` is less than a millionth of δ.

    W itself, if the plan's steps alone exceed δ: such a plan guarantees nothing.
    """
    if sampling.participations(sampling.steps) * beyond_reach(noise_multiplier) > delta:
        return window
    while window > 1 and (
        windows_beyond_reach(sampling, window, noise_multiplier, ratio) > _NEGLIGIBLE * delta
    ):
        window //= 2
    return window


def checked_window(
    window: Any, sampling: Sampling, noise_multiplier: float, ratio: float, delta: float
) -> int:
    """The window.

    Raises:
        ValueError: It is no positive integer, longer than the run, or so long that the noise of its
            sums would have to reach further than noise does.
    """
    window = validate.positive_integer("window", window)
    if window > sampling.steps:
        raise ValueError(
            f"Expected window <= {sampling.steps}, the steps of the run, got window={window}: "
            "rows are chosen after each window."
        )
    longest = longest_window(sampling, window, noise_multiplier, ratio, delta)
    if longest < window:
        raise ValueError(
            f"Expected window <= {longest}, got window={window}: one example in all of its steps "
            f"would move the sum of maps further than its noise reaches at noise_ratio={ratio:g}. "
            "A larger noise_ratio allows longer windows."
        )
    return window


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


@dataclasses.dataclass(frozen=True)
class Release:
    """Something else computed from the same data, composed jointly with training.

    Attributes:
        name: What is released, in the words of the statement.
        event: Its cost as a dp-accounting event, under the sampler's neighbouring relation.

    Raises:
        ValueError: `event` is no event, or repeats another one less than once.

    Examples:
        >>> import dp_accounting, dp_sparse
        >>> cities = dp_sparse.Release("histogram of cities", dp_accounting.GaussianDpEvent(100.0))
        >>> sampling = dp_sparse.StreamSampling(num_examples=800, batch_size=400)
        >>> budget = dp_sparse.PrivacyBudget(0.1, 1e-3)
        >>> plan = dp_sparse.PrivacyPlan(budget, sampling, releases=(cities,)).calibrate()
        >>> print(plan.price(cities))
        histogram of cities: epsilon 0.0019... beside training, 0.00904... on its own
    """

    name: str
    event: dp_accounting.DpEvent

    def __post_init__(self) -> None:
        object.__setattr__(self, "event", checked_event(self.event))

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal release."""
        return {"name": self.name, "event": event_config(self.event)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Release":
        """The release that `get_config` described."""
        return cls(config["name"], event_from_config(config["event"]))


@runtime_checkable
class RestsOnRelease(Protocol):
    """A part of a model that was made from a release, which the plan that trains it must pay."""

    release: Release | None

    @property
    def is_paid(self) -> bool:
        """Whether a plan that has the release has trained it."""
        ...

    def pay(self, steps: Callable[[], int]) -> None:
        """A plan that has the release begins to train it; `steps` counts its steps."""
        ...

    def require_paid(self, releases: Collection[Release], fix: str) -> None:
        """Raises PrivacyError, with what to do, unless the releases of a plan pay for it."""
        ...


def checked_releases(releases: Any) -> tuple[Release, ...]:
    """The releases as a tuple; raises ValueError unless all are `Release`s in a tuple or list."""
    if not isinstance(releases, list | tuple):
        raise ValueError(
            f"Expected releases=(Release(...), ...), a tuple, got releases={releases!r}."
        )
    for release in releases:
        if not isinstance(release, Release):
            raise ValueError(
                f"Expected every release to be a Release, got {release!r}: use "
                "releases=(rows.release,) or Release(name, event)."
            )
    return tuple(releases)


@dataclasses.dataclass(frozen=True)
class ReleasePrice:
    """What one release of a plan costs.

    Attributes:
        name: The release.
        joint: How much it adds to the plan's ε.
        alone: The ε of the release without anything else, at the plan's δ.
    """

    name: str
    joint: float
    alone: float

    def __str__(self) -> str:
        return f"{self.name}: epsilon {self.joint:.4g} beside training, {self.alone:.4g} on its own"


def place_of(release: Release, releases: Sequence[Release]) -> int:
    """Where a release is among those of a plan.

    Raises:
        ValueError: It is not there.
    """
    if release not in releases:
        raise ValueError(
            f"Expected a release of the plan, {[r.name for r in releases]}, got "
            f"{release.name!r}: add it before calibrate()."
        )
    return releases.index(release)
