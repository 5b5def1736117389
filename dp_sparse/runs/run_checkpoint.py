"""The checkpoint of a `Run`, which restores it when training begins."""

from typing import Any

import keras

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import PrivacyError
from dp_sparse.runs.run_folder import RunFolder
from dp_sparse.training import PrivateCheckpoint


class RunCheckpoint(PrivateCheckpoint):
    """A checkpoint that restores its run when training begins."""

    def __init__(self, folder: RunFolder, every_seconds: float) -> None:
        super().__init__(str(folder.path / "checkpoints"), every_seconds=every_seconds)
        self._of = folder
        self.plan: PrivacyPlan | None = None

    def restore(self, model: keras.Model, *, begun: bool = False) -> int:
        """Restores the run, and notes that there are checkpoints from now on."""
        self.refuse_other_plan(model)
        self._of.begin()
        spent = super().restore(model, begun=begun or self._of.has_checkpoints)
        self._of.note_checkpoints()
        return spent

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the model, unless that was done."""
        if self._restored is not None and self.model.optimizer is not self._optimizer:
            raise PrivacyError(
                f"The model of the run in {self._of.path} was made or compiled anew.\nMake the run "
                "again, too: run = dp_sparse.Run(...) saves what was trained, and restores it."
            )
        if self._restored is None and not self._closed:
            self.restore(self.model)
        super().on_train_begin(logs)
        if not self._optimizer.steps_left:
            raise PrivacyError(
                f"The run in {self._of.path} has ended: all {self._step()} steps of its plan are "
                "spent.\nrun.restore(model) loads its weights; check run.finished before fit."
            )

    def refuse_other_plan(self, model: keras.Model) -> None:
        """Raises PrivacyError if the model trains under another plan than the run's."""
        own = getattr(getattr(model, "optimizer", None), "plan", None)
        if own is not None and (self.plan is None or own.run_id != self.plan.run_id):
            raise PrivacyError(
                f"The optimizer of {model.name} has another plan than the run in "
                f"{self._of.path}.\nMake it with plan=run.plan."
            )
