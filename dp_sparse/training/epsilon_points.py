"""ε of a run step by step, for a few evaluations of the accountant."""

import functools
import math

from dp_sparse.accounting import PrivacyPlan

_PART = 10  # of its steps, by which one point may lie behind another


class EpsilonPoints:
    """ε at points of which the next one has at most a tenth more steps, or `every` more.

    An evaluation takes some 0.3 s. A run of S · `every` steps has about 10·ln S points; which ones
    depends on nothing else, so a run that goes on has the same.

    Args:
        plan: The plan of the run.
        every: Steps between two questions.
    """

    def __init__(self, plan: PrivacyPlan, every: int) -> None:
        self._plan, self._every = plan, every
        self._point, self._epsilon = 0, 0.0

    def at_least(self, step: int) -> float | None:
        """ε of the first point from `step` on, that of all steps last; None if the plan has none.

        Args:
            step: At least 1, and never less than before.
        """
        if step > self._point:
            while self._point < step:
                self._point += max(self._every, self._point // _PART // self._every * self._every)
            self._point = min(self._point, self._plan.sampling.steps)
            self._epsilon = self._plan.spent(self._point).epsilon
        return _finite(self._epsilon)

    @functools.cached_property
    def of_all_steps(self) -> float | None:
        """ε of all steps of the plan; None if it has none."""
        return _finite(self._plan.spent(self._plan.sampling.steps).epsilon)


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
