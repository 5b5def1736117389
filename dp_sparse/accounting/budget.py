"""The budget of a training run."""

import dataclasses
import math

from dp_sparse.core import validate


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The (ε, δ) that a training run may spend in all.

    Attributes:
        epsilon: ε > 0.
        delta: 0 < δ < 1; at most 1 / number of examples for a meaningful guarantee.

    Examples:
        >>> import dp_sparse
        >>> num_examples = 1_000_000
        >>> dp_sparse.PrivacyBudget(epsilon=1.0, delta=1 / num_examples)
        PrivacyBudget(epsilon=1.0, delta=1e-06)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        if (self.epsilon, self.delta) == (math.inf, 1):
            return  # no privacy, of a plan for debugging
        object.__setattr__(self, "epsilon", validate.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", validate.probability("delta", self.delta))
