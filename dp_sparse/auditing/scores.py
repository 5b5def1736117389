"""What an attack says of its canaries, and how often a threshold is right."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class CanaryScores:
    """The scores of canaries that were in the data, and of canaries that were not.

    A higher score speaks for a canary that was in.

    Attributes:
        held_in: float64 `[n]`, of those that were in.
        held_out: float64 `[m]`, of those that were not.

    Raises:
        ValueError: One of the two is empty, no vector, or has values that are no numbers.

    Examples:
        >>> from dp_sparse import auditing
        >>> scores = auditing.CanaryScores(held_in=[2.0, 3.0], held_out=[0.0, 1.0, 2.5])
        >>> scores.positives(threshold=2.0)  # true ones, and false ones
        (2, 1)
    """

    held_in: np.ndarray
    held_out: np.ndarray

    def __post_init__(self) -> None:
        for name in ("held_in", "held_out"):
            values = np.asarray(getattr(self, name), np.float64)
            if values.ndim != 1 or not values.size or np.isnan(values).any():
                raise ValueError(
                    f"Expected {name} to be a vector of one score or more, got shape "
                    f"{values.shape} with {int(np.isnan(values).sum())} that are no numbers."
                )
            object.__setattr__(self, name, values)

    @classmethod
    def of_coins(cls, scores: Any, present: Any) -> "CanaryScores":
        """The scores of canaries, told apart by the coins that decided which were in.

        Args:
            scores: float `[canaries]`.
            present: bool `[canaries]`.

        Raises:
            ValueError: All canaries were in, or none: toss the coins again.
        """
        scores, present = np.asarray(scores), np.asarray(present, bool)
        return cls(scores[present], scores[~present])

    @property
    def count(self) -> int:
        """How many canaries there are."""
        return len(self.held_in) + len(self.held_out)

    def positives(self, threshold: float) -> tuple[int, int]:
        """How many of those that were in, and of those that were not, reach the threshold."""
        return (
            int(np.count_nonzero(self.held_in >= threshold)),
            int(np.count_nonzero(self.held_out >= threshold)),
        )
