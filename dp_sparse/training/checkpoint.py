"""`PrivateCheckpoint`: training that goes on after it was killed, within what its plan pays for.

What anybody has seen of a step must not run again with other noise. So a checkpoint is written
before validation, before the model's methods that show weights, and at the end of the process.
"""

import atexit
import os
import sys
import threading
import time
import warnings
import weakref
from typing import Any

import keras

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import PrivacyError, validate
from dp_sparse.optimizers import private_optimizer_of
from dp_sparse.step import CheckpointedSteps, checkpointed_steps_of, set_checkpointed_steps
from dp_sparse.training.checkpoint_files import CheckpointFolder
from dp_sparse.training.plan_steps import TERMINATED, Sigterm

_RESTORED: weakref.WeakSet["PrivateCheckpoint"] = weakref.WeakSet()  # of this process
_NONE = "compile it with one, or use keras.callbacks.BackupAndRestore"


class PrivateCheckpoint(keras.callbacks.Callback):
    """Saves weights, slots and spent steps, so that a run which is killed goes on.

    It runs before all other callbacks and also saves at the end of each epoch, so that whatever
    others write then is covered by a checkpoint. On SIGTERM it saves after the step and exits with
    status 143; on a second one it exits at once.

    Args:
        folder: Where to; local, or any path of `tf.io.gfile`. One run and its plan each. Only a
            local one keeps other processes out: see that no two train in a remote one at once,
            which would publish the same steps twice.
        every_steps: Save whenever so many steps were taken; None for no such rule.
        every_seconds: Save whenever so many seconds have passed; None for no such rule.
        keep: How many checkpoints to keep, >= 1.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=2)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> folder = tempfile.TemporaryDirectory()
        >>> checkpoint = dp_sparse.PrivateCheckpoint(folder.name, every_steps=2)
        >>> spent = checkpoint.restore(model)  # 0 the first time
        >>> batches = plan.sampling.batches((np.ones((8, 1)), np.ones(8)), first_step=spent)
        >>> history = model.fit(batches, callbacks=[checkpoint], verbose=0)
        >>> checkpoint.steps
        [2, 4]

    ### Formal Guarantees
    A step is published when a checkpoint that holds it gets its name. Before that the folder says
    so, and from then on the step stays spent, whichever checkpoint is loaded. Steps that nobody has
    seen run again with fresh noise and cost nothing. No key is saved, so no noise is drawn twice.
    This holds for what is written by this callback, by `export_model`, `export_delta` and the
    model's `save`, `save_weights` and `export`, before which it saves, and by others at the end of
    epochs and of training; a callback of yours that reads weights in between in another way
    publishes steps that this one does not know of. It assumes that a run is not killed for what it
    shows of steps that no checkpoint holds, such as their loss: anyone who runs these steps again
    until they look good chooses among several releases. And no epsilon covers after which steps
    `every_seconds` saves, which depends on how long steps take, as large batches do. What a plan
    releases besides, such as selected rows, is yours to save.
    """

    reads_weights = True

    def __init__(
        self,
        folder: str,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 3,
    ) -> None:
        super().__init__()
        self._folder = CheckpointFolder(str(folder))
        if every_steps is not None:
            every_steps = validate.positive_integer("every_steps", every_steps)
        if every_seconds is not None:
            every_seconds = validate.positive("every_seconds", every_seconds)
        self.every_steps, self.every_seconds = every_steps, every_seconds
        self.keep = validate.positive_integer("keep", keep)
        self._restored: keras.Model | None = None
        self._covered = CheckpointedSteps()
        self._saving = self._closed = False
        self._one_saves = threading.RLock()  # an export of another thread also does
        self._sigterm = Sigterm()
        self._process = 0

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints in the folder."""
        return self._folder.steps()

    @property
    def steps_here(self) -> int:
        """The steps spent in this process, saved or not; 0 before `restore`."""
        return 0 if self._restored is None else self._step()

    def published(self, plan: PrivacyPlan) -> int:
        """The steps that a checkpoint of the folder holds; 0 where no run has begun.

        Raises:
            PrivacyError: They are lost, or those of another plan.
        """
        return self._folder.published(plan.fingerprint) or 0

    def restore(self, model: keras.Model, *, begun: bool = False) -> int:
        """Loads the newest checkpoint that is whole; returns how many steps are spent.

        Call it before `fit`, also when a run begins, and pass what it returns as `first_step` to
        samplers whose batches have an order.

        Args:
            model: Built, and compiled with an optimizer of the run's plan.
            begun: Whether you know that the run has begun: a folder without it is then refused, of
                which nothing else tells that it was lost.

        Raises:
            PrivacyError: The folder is another run's or in use, has lost what was published, or no
                checkpoint of it is whole; or the optimizer has another `PrivateCheckpoint`.
            ValueError: The model has no private optimizer, or is not built.

        Warns:
            UserWarning: A checkpoint is left out; it says which and why.
        """
        optimizer = private_optimizer_of(model, _NONE)
        if checkpointed_steps_of(optimizer) not in (None, self._covered):
            raise PrivacyError(
                f"Expected one PrivateCheckpoint for the optimizer of {model.name}, got a second "
                f"one, in {self._folder.path}, which would not know of steps that the first one "
                "publishes: use the first one, or compile the model anew."
            )
        if not model.built:
            raise ValueError(
                f"Expected a built model, got {model.name}: call it on a batch of inputs first."
            )
        self._settle()
        self._folder.lock()
        plan = optimizer.plan.fingerprint
        published = self._folder.published(plan)
        self._folder.tidy(published)
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        if published is None:
            if begun:
                raise PrivacyError(
                    f"Expected the checkpoints of a run that has begun in {self._folder.path}, got "
                    "none: which of its steps were published is not known. Restore the folder, or "
                    "begin with a new plan, which spends again."
                )
            published = int(optimizer.steps_spent.numpy())
            self._folder.publish(plan, published)
        elif published:
            self._load_newest(model, plan, published)
            optimizer.count_spent(published)
        self._covered.step = published
        set_checkpointed_steps(optimizer, self._covered)
        self._restored, self._optimizer = model, optimizer
        optimizer.before_publishing = self._save
        self._process = os.getpid()
        _RESTORED.add(self)
        return self._step()

    def _load_newest(self, model: keras.Model, plan: int, published: int) -> None:
        for step in reversed(self._folder.steps()):
            why = self._folder.load(model, plan, step)
            if why is None:
                return
            warnings.warn(f"{self._folder.name(step)} is left out: {why}.", stacklevel=3)
        raise PrivacyError(
            f"Expected a checkpoint in {self._folder.path}, which has published {published} steps, "
            "got none that is whole. Restore the files, or use a new folder and a new plan, which "
            "spends again."
        )

    def close(self) -> None:
        """Saves what is not saved, and lets another process into the folder.

        Otherwise that happens when this process ends. The run does not go on in this object.
        """
        self._settle()
        self._closed, self._restored = True, None
        self._folder.unlock()

    def _settle(self) -> None:
        """Saves what is not saved; steps of a model that was compiled anew are spent without."""
        if self._restored is None:
            return
        if self._restored.optimizer is self._optimizer:
            self._save()
        elif self._step() > self._covered.step:
            self._folder.publish(self._optimizer.plan.fingerprint, self._step())
            self._covered.step = self._step()

    def save_at_exit(self) -> None:
        """Saves steps that this process took since the last checkpoint, if the run is its own."""
        if not self._closed and self._process == os.getpid():
            self._settle()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the run goes on where the folder says, and waits for SIGTERM."""
        optimizer = private_optimizer_of(self.model, _NONE)
        if self._closed:
            raise PrivacyError(
                f"The run in {self._folder.path} was closed.\nMake it again to resume it."
            )
        if self._restored is not self.model or optimizer is not self._optimizer:
            raise PrivacyError(
                f"Expected restore(model) before fit, got a run that would begin in "
                f"{self._folder.path} as if nothing was spent: call checkpoint.restore(model)."
            )
        self._when = time.monotonic()
        self._sigterm.wait()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if it is time to."""
        step = self._step()
        since = step - self._covered.step
        enough = self.every_steps is not None and since >= self.every_steps
        late = (
            self.every_seconds is not None and time.monotonic() - self._when >= self.every_seconds
        )
        if enough or late:
            self._save()
        self._end_if_terminated()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Does not wait for the end of a validation."""
        self._end_if_terminated()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves before other callbacks write."""
        self._save()
        self._end_if_terminated()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves what the run ends with."""
        self._save()
        self._sigterm.end()
        self._end_if_terminated()

    def _step(self) -> int:
        return int(self._optimizer.steps_spent.numpy())

    def _save(self) -> None:
        if self._closed and self._step() > self._covered.step:
            raise PrivacyError(
                f"The run in {self._folder.path} was closed, and its model trained on.\nResume the "
                "run instead: make it again, and fit a model that it restores."
            )
        with self._one_saves:
            check = self._optimizer.watch_steps(f"a checkpoint was written in {self._folder.path}")
            step = self._step()
            if step > self._covered.step and not self._saving:
                self._saving = True  # which calls save_weights, before which it would save
                try:
                    self._folder.save(self._restored, self._optimizer.plan.fingerprint, step, check)
                finally:
                    self._saving = False
                self._covered.step = step  # logs may tell of it from now on
                for old in self._folder.steps()[: -self.keep]:
                    self._folder.remove(old)
            self._when = time.monotonic()

    def _end_if_terminated(self) -> None:
        if self._sigterm.came:
            self._save()
            self._sigterm.end()
            self._covered.exiting()
            raise SystemExit(TERMINATED)


@atexit.register
def _save_at_exit() -> None:
    """What was trained in this process may have been seen, so a later one may not repeat it."""
    for checkpoint in list(_RESTORED):
        try:
            checkpoint.save_at_exit()
        except Exception as error:
            print(
                f"dp_sparse: a run was not saved when its process ended: {error}", file=sys.stderr
            )
