"""A private run of a job, which `dp_sparse.Run` keeps in the directory of its report.

Its settings there are the job's config; `rows.npz` or `frequencies.npz` is what it selected or
counted before its plan was calibrated.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import ml_collections
import tensorflow as tf

import dp_sparse

REFUSALS = (ValueError, OSError, ImportError, dp_sparse.PrivacyError)
"""Errors that a command prints without a traceback."""

_MAY_CHANGE = ("report.verbose", "data.prepared")


def flattened(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config as dotted keys with their values."""
    if not isinstance(config, ml_collections.ConfigDict):
        return {prefix[:-1]: config}
    return {
        name: value
        for key in config
        for name, value in flattened(config[key], f"{prefix}{key}.").items()
    }


def settings_of(config: ml_collections.ConfigDict, but: Sequence[str]) -> dict[str, str]:
    """All settings by their dotted names, without those that may change when a run goes on."""
    return {name: str(v) for name, v in flattened(config).items() if name not in but}


def digest_of(config: ml_collections.ConfigDict, but: Sequence[str]) -> str:
    """A short hash of all settings but some; a name that ends with a dot is all of a section."""
    own = {
        name: value
        for name, value in settings_of(config, but).items()
        if not any(name.startswith(section) for section in but if section.endswith("."))
    }
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]


def difference(begun: Mapping[str, str], own: Mapping[str, str]) -> str | None:
    """The first setting that is not what the run began with, in words; None if all are."""
    for name in sorted({*begun, *own}):
        if begun.get(name) != own.get(name):
            return f"{name}={own.get(name)} instead of {begun.get(name)}"
    return None


class Run:
    """One run and its directory, `config.report.directory`.

    Args:
        config: Of the run.
        resume: Whether to go on with the run that is there; if there is none, it begins.
        monitor: A line of the log each time so many steps were taken; 0 for no log.

    Raises:
        ValueError: There is no directory, or it has a run and `resume` is False, one with another
            config, or one that another process is at.
    """

    def __init__(self, config: ml_collections.ConfigDict, resume: bool, monitor: int = 0) -> None:
        directory = config.report.directory
        if not directory:
            raise ValueError(
                "Expected report.directory, a folder for what a private run keeps to go on, got "
                "report.directory='': pass --config.report.directory=FOLDER."
            )
        named = config.report.get("diagnostics", "private")
        self._run = dp_sparse.Run(
            directory,
            settings=settings_of(config, _MAY_CHANGE),
            log_every=monitor or None,
            diagnostics="non_private" if named == "non_private" else "private",
        )
        if self._run.resumed and not resume:
            self._run.close()
            raise ValueError(
                f"Expected a directory without a run, got {directory}, which has one: pass "
                "--resume to go on with it, or another --config.report.directory. A second run on "
                "the same data spends a second budget."
            )

    def rows(self, select: Callable[[], dp_sparse.SelectedRows]) -> dp_sparse.SelectedRows:
        """The rows that the run trains, selected once: doing it again would spend again.

        Raises:
            ValueError: They are lost.
        """
        return self._run.release("rows.npz", select, dp_sparse.SelectedRows.load)

    def frequencies(
        self, count: Callable[[], dp_sparse.RowFrequencies]
    ) -> dp_sparse.RowFrequencies:
        """How often examples look up each row, counted once: doing it again would spend again.

        Raises:
            ValueError: They are lost.
        """
        return self._run.release("frequencies.npz", count, dp_sparse.RowFrequencies.load)

    def plan(self, calibrate: Callable[[], dp_sparse.PrivacyPlan]) -> dp_sparse.PrivacyPlan:
        """The plan of the run, calibrated once."""
        return self._run.plan_once(calibrate)

    def restore(self, model: keras.Model) -> int:
        """Loads what the run has reached, and returns how many of its steps are spent.

        Raises:
            PrivacyError: Its checkpoints are lost, as in `dp_sparse.PrivateCheckpoint.restore`.
        """
        return self._run.restore(model)

    def calibrate_probabilities(self, model: keras.Model, examples: Any) -> dp_sparse.Calibration:
        """Calibrated probabilities of the trained model, by a histogram that is drawn once."""
        return self._run.calibrate_probabilities(model, examples)

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """What must be among the callbacks of `fit`."""
        return self._run.callbacks()

    def batches(self, source: Any, **options: Any) -> tf.data.Dataset:
        """The batches that are left of the run, with the monitor's clock if it writes times."""
        return self._run.batches(source, **options)

    def timed(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The batches, with the monitor's clock if it writes times."""
        return self._run.timed(batches)
