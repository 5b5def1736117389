"""Up to which step checkpoints hold a run, which its logs wait for.

What a log tells of a step must not be seen while the step may still run again with other noise.
"""

import weakref
from collections.abc import Callable

from dp_sparse.accounting import has_folder
from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer


class CheckpointedSteps:
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


_OF_RUNS: weakref.WeakKeyDictionary[PrivateOptimizer, CheckpointedSteps] = (
    weakref.WeakKeyDictionary()
)


def set_checkpointed_steps(optimizer: PrivateOptimizer, covered: CheckpointedSteps) -> None:
    """From now on the optimizer's run goes on from checkpoints if it is killed."""
    _OF_RUNS[optimizer] = covered


def refuse_without_checkpoint(optimizer: PrivateOptimizer) -> None:
    """Raises PrivacyError if the plan has a folder that would not learn of the optimizer's steps.

    The next process would take them again, under a plan that was paid once.
    """
    if has_folder(optimizer.plan.run_id) and checkpointed_steps_of(optimizer) is None:
        raise PrivacyError(
            "The plan of this optimizer belongs to a Run whose checkpoint is not used, so its "
            "folder would not know of the steps.\nPass callbacks=run.callbacks() to fit, or call "
            "run.restore(model) before a loop of your own."
        )


def checkpointed_steps_of(optimizer: PrivateOptimizer) -> CheckpointedSteps | None:
    """None if the optimizer's run has no checkpoints to go on from."""
    return _OF_RUNS.get(optimizer)
