"""What is computed from the training data beside training, and its price."""

import dataclasses

import dp_accounting


@dataclasses.dataclass(frozen=True)
class Release:
    """Something else computed from the same data, composed jointly with training.

    Attributes:
        name: What is released, as the statement prints it.
        event: Its cost as a dp-accounting event, under the sampler's neighbouring relation.
    """

    name: str
    event: dp_accounting.DpEvent


@dataclasses.dataclass(frozen=True)
class ReleasePrice:
    """What one release of a plan costs.

    Attributes:
        name: The release.
        joint: By how much it raises the plan's ε.
        alone: The ε of the release without anything else, at the plan's δ.
    """

    name: str
    joint: float
    alone: float

    def __str__(self) -> str:
        return f"{self.name}: epsilon {self.joint:.4g} beside training, {self.alone:.4g} on its own"
