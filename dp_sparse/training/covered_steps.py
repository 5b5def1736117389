"""Up to which step checkpoints hold a run, which its logs wait for.

What a log tells of a step must not be seen while the step may still run again with other noise.
"""

import weakref
from collections.abc import Callable

from dp_sparse.optimizers import PrivateOptimizer


class CoveredSteps:
    """The steps of one optimizer's run that a checkpoint holds.

    Attributes:
        step: The highest of them.
    """

    def __init__(self) -> None:
        self.step = 0
        self._before_exit: list[weakref.WeakMethod[Callable[[], None]]] = []

    def before_exit(self, write: Callable[[], None]) -> None:
        """Has this method called when the process ends after a checkpoint, as on SIGTERM."""
        known = [reference() for reference in self._before_exit]
        if write not in known:
            self._before_exit.append(weakref.WeakMethod(write))

    def exiting(self) -> None:
        """Calls these methods; a checkpoint holds all steps."""
        for reference in self._before_exit:
            write = reference()
            if write is not None:
                write()


_OF_RUNS: weakref.WeakKeyDictionary[PrivateOptimizer, CoveredSteps] = weakref.WeakKeyDictionary()


def set_covered_steps(optimizer: PrivateOptimizer, covered: CoveredSteps) -> None:
    """From now on the optimizer's run goes on from checkpoints if it is killed."""
    _OF_RUNS[optimizer] = covered


def covered_steps_of(optimizer: PrivateOptimizer) -> CoveredSteps | None:
    """None if the optimizer's run has no checkpoints to go on from."""
    return _OF_RUNS.get(optimizer)
