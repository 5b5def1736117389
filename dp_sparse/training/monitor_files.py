"""The files of `PrivacyMonitor`: `log.jsonl` for programs, and events for TensorBoard.

Lines have no times, and neither have events: TensorBoard shows a step's number where a time would
stand. How long a step took depends on how many examples were in its batch, which no ε covers.
Events are written as protocol buffers for that reason; TensorFlow's own summary writers put the
time into each of them, and the name of the machine into that of the file.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError, exclusive, local_form

_LINES = "log.jsonl"
_EVENTS = "events.out.tfevents"
_NO_SCALARS = ("step", "non_private/time")  # events have fields for them


class LogFolder:
    """A folder of lines and events of one run, to which each of its processes adds.

    Args:
        path: The folder, local or any path of `tf.io.gfile`; it is made when a run begins.
    """

    def __init__(self, path: str) -> None:
        self.path = local_form(path).rstrip("/")
        self._lock: Any = None
        self._file: Any = None
        self._events: Any = None

    def open(self, spent: int) -> None:
        """Goes on behind the lines that are there.

        Args:
            spent: How many steps were spent when this run began.

        Raises:
            PrivacyError: Somebody else writes there, or there are lines of steps to come.
            ValueError: There is a file that is no log.
        """
        self.close()
        tf.io.gfile.makedirs(self.path)
        if "://" not in self.path:
            self._lock = exclusive(f"{self.path}/lock")
            if self._lock is None:
                raise PrivacyError(
                    f"Expected one run that writes its log to {self.path}, got a second one: use "
                    "another folder."
                )
        last = self._last_step()
        if last > spent:
            self.close()
            raise PrivacyError(
                f"Expected a log up to step {spent}, where this run begins, got lines up to step "
                f"{last} in {self.path}: they are of another run, or of one that no checkpoint "
                "covers. Use another folder."
            )
        self._file = tf.io.gfile.GFile(self._lines, "a")

    def write(self, line: Mapping[str, Any], time: float | None) -> None:
        """Adds a line and its events.

        Args:
            line: What `json` can write, with the `step`; values may be nested by names.
            time: Of the events, in seconds since 1970; None for no time.
        """
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        step = int(line["step"])
        when = float(step) if time is None else time
        if self._events is None:
            self._events = tf.io.TFRecordWriter(f"{self.path}/{_EVENTS}.{step:012d}")
            version = tf.compat.v1.Event(wall_time=when, file_version="brain.Event:2")
            self._events.write(version.SerializeToString())
        event = tf.compat.v1.Event(wall_time=when, step=step)
        for tag, value in _scalars(line):
            event.summary.value.add(tag=tag, simple_value=value)
        self._events.write(event.SerializeToString())
        self._events.flush()

    def close(self) -> None:
        """Closes the files; somebody else may write."""
        for file in (self._file, self._events, self._lock):
            if file is not None:
                file.close()
        self._file = self._events = self._lock = None

    @property
    def is_open(self) -> bool:
        """Whether a line can be written."""
        return self._file is not None

    @property
    def _lines(self) -> str:
        return f"{self.path}/{_LINES}"

    def _last_step(self) -> int:
        """That of the last line, or 0; a line that was not written whole is removed."""
        if not tf.io.gfile.exists(self._lines):
            return 0
        with tf.io.gfile.GFile(self._lines) as file:
            whole, _, rest = file.read().rpartition("\n")
        if rest:
            self._replace(whole + "\n" if whole else "")
        try:
            return int(json.loads(whole.rpartition("\n")[2])["step"]) if whole else 0
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"Expected lines of JSON with their step in {self._lines}, got others: use another "
                "folder."
            ) from None

    def _replace(self, content: str) -> None:
        unfinished = f"{self.path}/.{_LINES}.tmp"
        with tf.io.gfile.GFile(unfinished, "w") as file:
            file.write(content)
        tf.io.gfile.rename(unfinished, self._lines, overwrite=True)


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Each number with its path; what has none is left out."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{path}/")
        elif value is not None and path not in _NO_SCALARS:
            yield path, float(value)
