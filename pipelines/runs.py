"""What a private run keeps in its directory, so that it goes on after it was killed.

Beside its report there are `run.json`, its config; `rows.npz` or `frequencies.npz`, and
`plan.json`, what it selected or counted and may spend, each made once; `checkpoints`, of
`dp_sparse.PrivateCheckpoint`, and `begun.json`, once there must be some; and, if it is monitored,
`log`, of `dp_sparse.PrivacyMonitor`. `lock` keeps other processes out while one is there.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import keras
import ml_collections
import tensorflow as tf

import dp_sparse
from pipelines.files import lock, remove_unfinished, whole_file

T = TypeVar("T", dp_sparse.SelectedRows, dp_sparse.RowFrequencies)

REFUSALS = (ValueError, OSError, ImportError, dp_sparse.PrivacyError)
"""What a command says in a sentence, without a traceback."""

_MAY_CHANGE = ("report.verbose", "data.prepared")
_SECONDS = 600.0  # between checkpoints; each epoch ends with one, too


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
        if not config.report.directory:
            raise ValueError(
                "Expected report.directory, a folder for what a private run keeps to go on, got "
                "report.directory='': pass --config.report.directory=FOLDER."
            )
        self._directory = Path(config.report.directory)
        self._lock = only_one(self._directory)
        self._settings = settings_of(config, _MAY_CHANGE)
        self._goes_on = (self._directory / "run.json").exists()
        if self._goes_on:
            self._check(resume)
        else:
            self._refuse_remains()
        self._checkpoint = dp_sparse.PrivateCheckpoint(
            str(self._directory / "checkpoints"), every_seconds=_SECONDS
        )
        self._monitor = None
        if monitor:
            named = config.report.get("diagnostics", "private")
            diagnostics = "non_private" if named == "non_private" else "private"
            self._monitor = dp_sparse.PrivacyMonitor(
                str(self._directory / "log"), every_steps=monitor, diagnostics=diagnostics
            )

    def _check(self, resume: bool) -> None:
        if not resume:
            raise ValueError(
                f"Expected a directory without a run, got {self._directory}, which has one: pass "
                "--resume to go on with it, or another --config.report.directory. A second run on "
                "the same data spends a second budget."
            )
        begun = json.loads((self._directory / "run.json").read_text())
        changed = difference(begun, self._settings)
        if changed is not None:
            raise ValueError(
                f"Expected the config that the run in {self._directory} began with, got {changed}: "
                "go on with its own, or use another --config.report.directory."
            )

    def _refuse_remains(self) -> None:
        """What is written only once a run has begun tells that `run.json` was lost."""
        for name in ("rows.npz", "frequencies.npz", "begun.json"):
            if (self._directory / name).exists():
                raise ValueError(
                    f"Expected run.json of the run in {self._directory}, whose {name} is there, "
                    "got no file: restore it, or use another --config.report.directory. A run "
                    "that begins here would spend what was paid once more."
                )

    def _begin(self) -> None:
        """From now on the directory has a run: something of the data may be written."""
        if not self._goes_on:
            _write(self._directory / "run.json", self._settings)
            self._goes_on = True

    def rows(self, select: Callable[[], dp_sparse.SelectedRows]) -> dp_sparse.SelectedRows:
        """The rows that the run trains, selected once: doing it again would spend again.

        Raises:
            ValueError: They are lost.
        """
        path = self._directory / "rows.npz"
        return self._paid_once("selected rows", path, dp_sparse.SelectedRows.load, select)

    def frequencies(
        self, count: Callable[[], dp_sparse.RowFrequencies]
    ) -> dp_sparse.RowFrequencies:
        """How often examples look up each row, counted once: doing it again would spend again.

        Raises:
            ValueError: They are lost.
        """
        path = self._directory / "frequencies.npz"
        return self._paid_once("counted frequencies", path, dp_sparse.RowFrequencies.load, count)

    def _paid_once(
        self, what: str, path: Path, load: Callable[[Path], T], make: Callable[[], T]
    ) -> T:
        if self._goes_on and path.exists():
            return load(path)
        if self._goes_on and self._plan.exists():
            raise ValueError(
                f"Expected the {what} of this run in {path}, got no file: restore it, or use "
                "another --config.report.directory."
            )
        remove_unfinished(path)
        made = make()
        self._plan.unlink(missing_ok=True)  # of a start that failed before it selected
        self._begin()
        made.save(path)
        return made

    def plan(self, calibrate: Callable[[], dp_sparse.PrivacyPlan]) -> dp_sparse.PrivacyPlan:
        """The plan of the run, calibrated once."""
        if not self._goes_on or not self._plan.exists():
            _write(self._plan, calibrate().get_config())
        return dp_sparse.PrivacyPlan.from_config(json.loads(self._plan.read_text()))

    def restore(self, model: keras.Model) -> int:
        """Loads what the run has reached, and returns how many of its steps are spent.

        Raises:
            PrivacyError: Its checkpoints are lost, as in `dp_sparse.PrivateCheckpoint.restore`.
        """
        self._begin()
        return restored(self._checkpoint, model, self._directory / "begun.json")

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """What must be among the callbacks of `fit`."""
        return [self._checkpoint, *([self._monitor] if self._monitor is not None else [])]

    def timed(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The batches, with the monitor's clock if it writes times."""
        if self._monitor is None or self._monitor.diagnostics == "private":
            return batches
        return self._monitor.timed(batches)

    @property
    def _plan(self) -> Path:
        return self._directory / "plan.json"


def only_one(directory: Path) -> IO[bytes]:
    """Keeps other runs out of a directory as long as the file is open.

    What is made once and paid once, such as selected rows, two of them would make twice.

    Raises:
        ValueError: Another run is there.
    """
    held = lock(directory / "lock")
    if held is None:
        raise ValueError(
            f"Expected nobody else in {directory}, got a run that has not ended: wait until its "
            "process is gone, or name another directory."
        )
    return held


def restored(checkpoint: dp_sparse.PrivateCheckpoint, model: keras.Model, mark: Path) -> int:
    """Restores a run, and marks that it has begun; returns how many of its steps are spent.

    Args:
        checkpoint: Of the run.
        model: As in `PrivateCheckpoint.restore`.
        mark: A file outside the checkpoints: where it is, they must be.

    Raises:
        PrivacyError: As `PrivateCheckpoint.restore`.
    """
    spent = checkpoint.restore(model, begun=mark.exists())
    _write(mark, {"begun": True})
    return spent


def _write(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
