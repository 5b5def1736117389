"""Whose run a folder of drawn batches serves: one run of one plan.

Two runs on the same batches are no two Poisson-sampled runs, also if each keeps to its plan: they
share the coins, and no composition theorem covers that. The folder's `plan.json` names the plan and
the run that began at step 0; other runs may go on behind it, as after a crash, but not begin anew.
"""

import json

import tensorflow as tf

from dp_sparse.core import PrivacyError

_FILE = "plan.json"


def claim(folder: str, plan: int | None, run: str, begins: bool) -> None:
    """Writes whom the batches serve, or compares.

    Args:
        folder: Of the batches.
        plan: The fingerprint of the plan, or None if it is not calibrated.
        run: A name of the run.
        begins: Whether it begins at step 0.

    Raises:
        PrivacyError: There is no plan; the batches serve another one, or another run that began.
    """
    if plan is None:
        raise PrivacyError(
            "Expected the sampler of a calibrated plan, which prepared batches serve alone: use "
            "plan.sampling.batches(...)."
        )
    path = f"{folder}/{_FILE}"
    if not tf.io.gfile.exists(path):
        _write(folder, path, {"plan": plan, "run": run})
    with tf.io.gfile.GFile(path) as file:
        claimed = json.loads(file.read())
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


def _write(folder: str, path: str, content: dict[str, int | str]) -> None:
    unfinished = f"{folder}/.{_FILE}.{content['run']}.tmp"
    with tf.io.gfile.GFile(unfinished, "w") as file:
        file.write(json.dumps(content) + "\n")
    try:
        tf.io.gfile.rename(unfinished, path, overwrite=False)
    except tf.errors.AlreadyExistsError:  # another process was faster
        tf.io.gfile.remove(unfinished)
