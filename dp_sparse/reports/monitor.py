"""`PrivacyMonitor`: what a run may tell while it trains, for TensorBoard and for other programs.

By default a line holds what was released or is public: ε, δ, rows noised, what is expected of them.
Losses, sizes of batches and also times are covered by no ε; they are written only with
`diagnostics="non_private"`, under a name that says so.

The files of `PrivacyMonitor`: `log.jsonl` for programs, and events for TensorBoard.

Lines have no times, and neither have events: TensorBoard shows a step's number where a time would
stand. How long a step took depends on how many examples were in its batch, which no ε covers.
Events are written as protocol buffers for that reason; TensorFlow's own summary writers put the
time into each of them, and the name of the machine into that of the file.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import PrivacyError, exclusive, local_form, validate
from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer, private_optimizer_of
from dp_sparse.reports.run_diagnosis import (
    EpsilonPoints,
    InputWait,
    counts_without_noise,
    rows_per_step,
    totals,
)
from dp_sparse.step import checkpointed_steps_of

_LINES = "log.jsonl"
_EVENTS = "events.out.tfevents"
_NO_SCALARS = ("step", "non_private/time")  # events have fields for them
_DIAGNOSTICS = ("private", "non_private")
_RELEASED = (
    "epsilon",
    "epsilon_not_guaranteed",
    "learning_rate",
)  # what other callbacks put among training metrics


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


class PrivacyMonitor(keras.callbacks.Callback):
    """Writes a line every so many steps, to `log.jsonl` and as scalars for TensorBoard.

    A line has `step`; `epsilon`, of up to a tenth more steps, so it is never below what was spent,
    and exact after the last one; `epsilon_of_all_steps`, which holds in its place for a run that
    stops because of what it saw, unless the plan has `stopping="any time"`; `delta`;
    `epsilon_not_guaranteed`, of a plan whose noise follows from such a claim; `expected_examples`,
    of all steps so far; and by the paths of the tables `survivors` (rows noised a step, on average
    since the line before), `expected_false_rows` (of them by noise alone) and `gradient_size`
    (entries noised a step). Of LazyDP it has neither rows nor sizes. After each epoch with
    validation another line has `step` and `validation`.

    With a `PrivateCheckpoint` lines stay in memory until a checkpoint holds their steps. So a run
    that is killed has no line of a step that runs again, though lines behind its last checkpoint
    are missing. Without one they are written at once, and no such run can go on in another process.

    Args:
        folder: Where to; local, or any path of `tf.io.gfile`. One run each.
        every_steps: A line each time so many steps were taken.
        diagnostics: "private", or "non_private" to add what no ε covers under `non_private`: time,
            speed, the share of it that waits for batches (of those that went through `timed`),
            sizes of batches, clip fraction, examples that did not train, training metrics.

    Raises:
        ValueError: A number out of range, another `diagnostics`; when training begins, a model
            without a private optimizer, or a folder with a file that is no log.
        PrivacyError: When training begins, the folder holds steps to come, or is in use.

    Examples:
        >>> import dp_sparse, json, keras, numpy as np, pathlib, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=2)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> folder = tempfile.TemporaryDirectory()
        >>> monitor = dp_sparse.PrivacyMonitor(folder.name, every_steps=2)
        >>> batches = plan.sampling.batches((np.arange(8), np.ones(8)))
        >>> history = model.fit(batches, callbacks=[monitor], verbose=0)
        >>> lines = pathlib.Path(folder.name, "log.jsonl").read_text().splitlines()
        >>> [(line["step"], f"{line['epsilon']:.2f}") for line in map(json.loads, lines)]
        [(2, '1.00'), (4, '1.00')]

    ### Formal Guarantees
    With `diagnostics="private"` a line is a function of the plan, the optimizer's settings, rows
    that steps released, and validation metrics, which no ε covers if held-out examples are private.
    Which steps have a line follows from their numbers alone. When a line reaches the disk is not
    covered: who watches the files sees how fast a run is.
    """

    reads_weights = False

    def __init__(
        self, folder: str, *, every_steps: int = 100, diagnostics: str = "private"
    ) -> None:
        super().__init__()
        if diagnostics not in _DIAGNOSTICS:
            raise ValueError(f"Expected diagnostics in {_DIAGNOSTICS}, got {diagnostics!r}.")
        self.diagnostics = diagnostics
        self.every_steps = validate.positive_integer("every_steps", every_steps)
        self._folder = LogFolder(str(folder))
        self._pending: list[dict[str, Any]] = []
        self._waited = InputWait() if diagnostics == "non_private" else None

    def timed(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The same batches, with a clock on how long a step waits for each; on one device.

        Raises:
            ValueError: `diagnostics="private"`, in which no time is written.
        """
        if self._waited is None:
            raise ValueError(
                "Expected diagnostics='non_private', which alone writes times, got "
                "diagnostics='private': pass the batches themselves to fit."
            )
        return self._waited.timed(batches)

    def close(self) -> None:
        """Lets another process write the log, as the end of training does."""
        self._folder.close()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Goes on behind the lines that are there."""
        self._optimizer = private_optimizer_of(self.model, "PrivacyMonitor has nothing to report")
        self._covered = checkpointed_steps_of(self._optimizer)
        step = self._step()
        self._folder.open(step)
        self._pending.clear()
        self._epsilon = EpsilonPoints(self._optimizer.plan, self.every_steps)
        self._start_interval(step)
        if self._covered is not None:
            self._covered.before_exit(self.write_covered)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock of a step."""
        if self._waited is not None:
            self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Makes a line if it is time to, and writes those that may be seen."""
        if self._waited is not None:
            self._seconds += time.perf_counter() - self._begun
        self._make_line_if_due(logs)
        self._write_covered()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Makes a line of validation metrics, or of training metrics if they are asked for."""
        found = {n: _number(value) for n, value in (logs or {}).items() if _is_validation(n)}
        line: dict[str, Any] = {"validation": found} if found else {}
        if self._waited is not None:
            line["non_private"] = {"time": time.time(), "epoch_metrics": _metrics(logs)}
        if line:
            self._pending.append({"step": self._step(), **line})
        self._write_covered()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Makes a line of where training ended, which a checkpoint holds, if there is one."""
        if self._step() > self._last:
            self._make_line(self._step(), None)
        self._write_covered()
        self._folder.close()

    def write_covered(self) -> None:
        """Writes what may be seen, before the process exits after the checkpoint of its step."""
        if self._folder.is_open:  # not that of an earlier fit
            self._make_line_if_due(None)
            self._write_covered()

    def _write_covered(self) -> None:
        while self._pending and self._pending[0]["step"] <= self._may_be_seen():
            line = self._pending.pop(0)
            self._folder.write(line, line.get("non_private", {}).get("time"))

    def _may_be_seen(self) -> float:
        return math.inf if self._covered is None else self._covered.step

    def _step(self) -> int:
        return int(self._optimizer.steps_spent.numpy())

    def _start_interval(self, step: int) -> None:
        self._last = step
        self._due = (step // self.every_steps + 1) * self.every_steps
        self._totals = totals(self._optimizer)
        self._seconds = 0.0
        if self._waited is not None:
            self._waited.restart()

    def _make_line_if_due(self, logs: dict[str, Any] | None) -> None:
        step = self._step()
        if step >= self._due:
            self._make_line(step, logs)

    def _make_line(self, step: int, logs: dict[str, Any] | None) -> None:
        plan, before, after = self._optimizer.plan, self._totals, totals(self._optimizer)
        line: dict[str, Any] = {
            "step": step,
            "epsilon": self._epsilon.at_least(step),
            "epsilon_of_all_steps": self._epsilon.of_all_steps,
            "delta": plan.budget.delta,
            **_claimed(plan),
            "expected_examples": step * plan.sampling.expected_batch_size,
            **_of_tables(self._optimizer, rows_per_step(before, after)),
        }
        if self._waited is not None:
            line["non_private"] = {
                "time": time.time(),
                **counts_without_noise(before, after),
                **self._speed(after.steps - before.steps),
                "metrics": _metrics(logs),
            }
        self._pending.append(line)
        self._start_interval(step)

    def _speed(self, steps: int) -> dict[str, float]:
        """Times of the steps since the line before, without callbacks and validation."""
        assert self._waited is not None
        seconds = max(self._seconds, 1e-9)
        speed = {
            "steps_per_second": steps / seconds,
            "expected_examples_per_second": (
                steps * self._optimizer.plan.sampling.expected_batch_size / seconds
            ),
        }
        if self._waited.used:
            speed["input_wait_share"] = self._waited.seconds() / seconds
        return speed


def _claimed(plan: PrivacyPlan) -> dict[str, float]:
    """What is claimed of the noise of all steps without proof."""
    unproven = plan.mechanism.not_guaranteed
    return {} if unproven is None else {"epsilon_not_guaranteed": unproven[1]}


def _of_tables(optimizer: PrivateOptimizer, rows: list[float]) -> dict[str, dict[str, float]]:
    """By path, what was released of each table and what is expected of it."""
    tables = optimizer.noised_tables
    if optimizer.delays_noise or not tables:
        return {}
    paths = [table.path for table in tables]
    if not optimizer.selects_rows:
        return {"gradient_size": {t.path: float(math.prod(t.shape)) for t in tables}}
    sizes = [count * table.shape[1] for count, table in zip(rows, tables, strict=True)]
    found = {"survivors": rows, "gradient_size": sizes}
    if isinstance(optimizer, DPAdaFESTOptimizer):
        found["expected_false_rows"] = optimizer.false_rows_per_step
    return {name: dict(zip(paths, values, strict=True)) for name, values in found.items()}


def _is_validation(name: str) -> bool:
    return name.startswith("val_")


def _metrics(logs: dict[str, Any] | None) -> dict[str, float | None]:
    """Training metrics, which no ε covers."""
    given = (logs or {}).items()
    return {n: _number(v) for n, v in given if not _is_validation(n) and n not in _RELEASED}


def _number(value: Any) -> float | None:
    """For JSON, which has no NaN."""
    return float(value) if math.isfinite(float(value)) else None
