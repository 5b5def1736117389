"""What else is computed from the training data, and what it costs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting

from dp_sparse.accounting.events import checked_event, event_config, event_from_config


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
