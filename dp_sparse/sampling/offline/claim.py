"""Whose run a folder of drawn batches serves: one run of one plan.

Two runs on the same batches are no two Poisson-sampled runs, also if each keeps to its plan: they
share the coins, and no composition theorem covers that. The folder's `plan.json` names the plan and
the run that began at step 0; other runs may go on behind it, as after a crash, but not begin anew.
A plan that was pickled into another process begins another run there. Of processes that begin at
once, one has the batches of a local folder; on other file systems of `tf.io.gfile`, which cannot
name a file only if there is none, begin one at a time. No folder can tell of copies of it.
"""

import json
import os
import secrets
import time
from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError, first_file

_FILE = "plan.json"
_PATIENCE = 5.0  # seconds for another process to write what it has begun


class _Process:
    """The name of this process; a copy of a run in another one is another run."""

    name = secrets.token_hex(8)

    @classmethod
    def renew(cls) -> None:
        """Of a process that was forked."""
        cls.name = secrets.token_hex(8)


os.register_at_fork(after_in_child=_Process.renew)


def run_here(run: str) -> str:
    """The name of a run in this process: a pickle of its plan begins another run elsewhere."""
    return f"{run}-{_Process.name}"


def claim(folder: str, plan: int | None, run: str, begins: bool) -> None:
    """Writes whom the batches serve, or compares.

    Args:
        folder: Of the batches.
        plan: The fingerprint of the plan, or None if it is not calibrated.
        run: A name of the run.
        begins: Whether it begins at step 0.

    Raises:
        PrivacyError: There is no plan; the batches serve another one, or another run that began; or
            what the folder says cannot be read.
        OSError: The folder cannot be written to.
    """
    if plan is None:
        raise PrivacyError(
            "Expected the sampler of a calibrated plan, which prepared batches serve alone: use "
            "plan.sampling.batches(...)."
        )
    path = f"{folder}/{_FILE}"
    if not tf.io.gfile.exists(path):
        _write(folder, path, {"plan": plan, "run": run})
    claimed = _read(path)
    if claimed["plan"] != plan:
        raise PrivacyError(
            f"Expected batches that no other plan trains on, got {folder}, which serves another "
            "one: two runs on one draw do not compose as sampled. Prepare the data again, or use "
            "offline_sampling(..., shared=True), whose statement says so."
        )
    if begins and claimed["run"] != run:
        raise PrivacyError(
            f"Expected batches that no run began with, got {folder}, with which one began at step "
            "0: a second one from there shares its batches, and the two do not compose as sampled. "
            f"Go on with first_step=, or prepare again. If nobody has seen anything of that run, "
            f"remove {path}."
        )


def _read(path: str) -> dict[str, Any]:
    """Waits for what another process is about to write, where it cannot do so at once."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            with tf.io.gfile.GFile(path) as file:
                found = json.loads(file.read())
            return {"plan": int(found["plan"]), "run": str(found["run"])}
        except (ValueError, TypeError, KeyError):
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
        raise PrivacyError(
            f"Expected {path} to say whom the batches serve, got a file that does not tell it: "
            "prepare again. If no run has begun with them, or nobody has seen anything of it, "
            "remove that file."
        )


def _write(folder: str, path: str, content: dict[str, int | str]) -> None:
    """Of several processes that write at once, one does, on a local file system."""
    described = json.dumps(content) + "\n"
    if "://" not in path:
        first_file(path, described.encode())
        return
    unfinished = f"{folder}/.{_FILE}.{content['run']}.tmp"
    with tf.io.gfile.GFile(unfinished, "w") as file:
        file.write(described)
    try:
        tf.io.gfile.rename(unfinished, path, overwrite=False)
    except tf.errors.AlreadyExistsError:  # another process was faster
        tf.io.gfile.remove(unfinished)
