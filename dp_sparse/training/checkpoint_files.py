"""The files of `PrivateCheckpoint`: weights that are whole or not there, and what was published.

`published.json` holds the highest step of which anybody may have seen something. It is on the disk
before that can be: steps up to it stay spent, whichever weights a later process finds. Beside it
are `step-N.weights.h5`, Keras' own format, and `step-N.json` with the size and the SHA-256 of these
weights, which is written last. No file holds a key. A folder is local, or any path of
`tf.io.gfile`; a local one has a lock, so that no two processes train in it at once. A process that
is killed may leave weights under a name that begins with a dot: the next one names those of the
published step, and removes those of a step that was not published.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.core import PrivacyError, StateFile, exclusive, local_form, require_room, synced

_PUBLISHED = "published.json"
_UNNAMED = ".step-"  # what begins so was not published


class CheckpointFolder:
    """A folder of checkpoints of one run.

    Args:
        path: The folder; it is made when something is written.
    """

    def __init__(self, path: str) -> None:
        self.path = local_form(path).rstrip("/")
        self._local = "://" not in self.path
        self._lock: Any = None

    def lock(self) -> None:
        """Keeps other processes out until this one ends, however it ends.

        Raises:
            PrivacyError: Another process trains in this folder.
        """
        tf.io.gfile.makedirs(self.path)
        if not self._local or self._lock is not None:
            return
        self._lock = exclusive(self._of("lock"))
        if self._lock is None:
            raise PrivacyError(
                f"Expected one process in {self.path}, got a second one: both would publish the "
                "same steps. Wait for the first, or use another folder and plan."
            )

    def unlock(self) -> None:
        """Lets other processes in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def tidy(self, published: int | None) -> None:
        """Ends what a process began that was killed while it saved.

        Weights of the published step get their names. Others are removed: the step runs again with
        other noise, and anyone who saw both would learn more than one tells.
        """
        if published is not None and tf.io.gfile.exists(self._unfinished(_about(published))):
            self._name_both(published)
        for name in map(_without_slash, tf.io.gfile.listdir(self.path)):
            if not name.startswith(_UNNAMED):
                continue
            path = self._of(name)
            (tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove)(path)
        if not self._local:
            for folder in Path(tempfile.gettempdir()).glob(f"{self._own_prefix}*"):
                shutil.rmtree(folder)

    def published(self, plan: int) -> int | None:
        """The highest published step, or None if no run of this folder has begun.

        Args:
            plan: The fingerprint of the plan.

        Raises:
            PrivacyError: It is lost, cannot be read, or is that of another plan.
        """
        path = self._of(_PUBLISHED)
        if not tf.io.gfile.exists(path):
            if self.steps():
                raise PrivacyError(
                    f"Expected {path}, got checkpoints without it: which of their steps were "
                    "published is not known. Use a new folder and a new plan, which spends again."
                )
            return None
        file = StateFile(path, "Use a new folder and a new plan, which spends again.")
        of, step = file.read(lambda found: (int(found["plan"]), int(found["published"])))
        if of != plan:
            raise PrivacyError(
                f"Expected the folder of this plan's run, got {self.path}, which is that of a plan "
                "with other sampling, noise or releases. Use another folder."
            )
        return step

    def publish(self, plan: int, step: int) -> None:
        """Writes that steps up to this one may be seen; they are on the disk when it returns.

        Raises:
            PrivacyError: More of them were published, by another process.
        """
        before = self.published(plan) or 0 if tf.io.gfile.exists(self._of(_PUBLISHED)) else 0
        if step < before:
            raise PrivacyError(
                f"{self.path} has published {before} steps, more than the {step} of this process: "
                "another one has resumed the run.\nResume it in a new process."
            )
        self._write(_PUBLISHED, json.dumps({"plan": plan, "published": step}).encode())

    def steps(self) -> list[int]:
        """The steps of the checkpoints that were written whole, in order."""
        if not tf.io.gfile.exists(self.path):
            return []
        names = tf.io.gfile.listdir(self.path)
        found = [n.split("-")[1].split(".")[0] for n in names if n.startswith("step-")]
        return sorted({int(n) for n in found if n.isdigit()})

    def save(self, model: keras.Model, plan: int, step: int, check: Callable[[], None]) -> None:
        """Writes the weights and their description, publishes the step, then names both.

        All that needs room on the disk is there before the step is published.

        Args:
            model: The model.
            plan: The fingerprint of the plan.
            step: The steps that its weights hold.
            check: Called when they are written; raises if they hold another step by now.
        """
        unnamed = self._of(f".{_weights(step)}")
        place = self.path if self._local else None
        with tempfile.TemporaryDirectory(prefix=self._own_prefix, dir=place) as folder:
            own = f"{folder}/{_weights(step)}"
            require_room(folder, _sizes(model))
            model.save_weights(own)
            check()
            size, digest = _described(own)
            if self._local:
                synced(own)
                os.replace(own, unnamed)
            else:
                tf.io.gfile.copy(own, unnamed, overwrite=True)
        about = {"plan": plan, "step": step, "bytes": size, "sha256": digest}
        self._write_unnamed(_about(step), json.dumps(about).encode())
        self.publish(plan, step)
        self._name_both(step)

    def _name_both(self, step: int) -> None:
        unnamed = self._of(f".{_weights(step)}")
        if tf.io.gfile.exists(unnamed):
            tf.io.gfile.rename(unnamed, self._of(_weights(step)), overwrite=True)
        self._name(_about(step))

    def load(self, model: keras.Model, plan: int, step: int) -> str | None:
        """Loads the weights of a step into the model, or returns why they are of no use."""
        if not tf.io.gfile.exists(self._of(_about(step))):
            return "it was not written whole"
        with tempfile.TemporaryDirectory() as folder:
            path = self._of(_weights(step))
            try:
                with tf.io.gfile.GFile(self._of(_about(step))) as file:
                    about = json.loads(file.read())
                if not self._local:
                    tf.io.gfile.copy(path, f"{folder}/{_weights(step)}")
                    path = f"{folder}/{_weights(step)}"
                found = _described(path)
                wanted = about["bytes"], about["sha256"]
            except (ValueError, TypeError, KeyError, OSError, tf.errors.OpError):
                return "a file of it is missing or cannot be read"
            if about.get("plan") != plan or about.get("step") != step:
                return "it is of another run"
            if found != wanted:
                return "its weights are not those that were written"
            model.load_weights(path)
        return None

    def remove(self, step: int) -> None:
        """Removes a checkpoint, first what says that it is whole."""
        for name in (_about(step), _weights(step)):
            if tf.io.gfile.exists(self._of(name)):
                tf.io.gfile.remove(self._of(name))

    def name(self, step: int) -> str:
        """What a message calls a checkpoint."""
        return self._of(_weights(step))

    @property
    def _own_prefix(self) -> str:
        """Begins the names of folders of unpublished weights, also outside of a remote folder."""
        return f"{_UNNAMED}{hashlib.sha256(self.path.encode()).hexdigest()[:12]}-"

    def _of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _write(self, name: str, content: bytes) -> None:
        self._write_unnamed(name, content)
        self._name(name)

    def _write_unnamed(self, name: str, content: bytes) -> None:
        unfinished = self._unfinished(name)
        with tf.io.gfile.GFile(unfinished, "wb") as file:
            file.write(content)
        if self._local:
            synced(unfinished)

    def _name(self, name: str) -> None:
        tf.io.gfile.rename(self._unfinished(name), self._of(name), overwrite=True)
        if self._local:
            synced(self.path)

    def _unfinished(self, name: str) -> str:
        return self._of(f".{name}.tmp")


def _without_slash(name: str) -> str:
    return name.rstrip("/")  # which folders have on some file systems


def _weights(step: int) -> str:
    return f"step-{step:09d}.weights.h5"


def _about(step: int) -> str:
    return f"step-{step:09d}.json"


def _sizes(model: keras.Model) -> list[int]:
    """Bytes of each weight that is saved."""
    values = [*model.variables, *model.optimizer.variables]
    return [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in values]


def _described(path: str) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return os.path.getsize(path), digest
