"""Callbacks beside private training: their order, and the few that cannot run there.

All but Keras' history and progress bar get released values alone, unless a
`PrivacyReport(diagnostics="non_private")` accepts the leak. Refused are those that would write
training metrics by another way, or publish steps that a killed run takes again.

No ε covers training loss and metrics. Keras' history and progress bar keep them in the process and
on the console; every other callback sees what is left: validation metrics, ε, the learning rate.
One that asks for a training metric is told once that there is none to see.

### Formal Guarantees
What a callback gets through `logs` is a function of released values, and of validation metrics,
which no ε covers if held-out examples are private. A callback that reads `model.metrics`, or the
history, reads training metrics.
"""

import functools
import inspect
import math
import string
import warnings
from collections.abc import Callable
from typing import Any

import keras

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.reports import PrivacyMonitor, PrivacyReport
from dp_sparse.step import checkpointed_steps_of, flush_hooks
from dp_sparse.training import plan_steps
from dp_sparse.training.checkpoint import PrivateCheckpoint

_RELEASED = ("epoch", "batch", "epsilon", "epsilon_not_guaranteed", "learning_rate")
_SEE_ALL = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
_WITH_METRICS = ("on_batch_end", "on_train_batch_end", "on_epoch_end", "on_train_end")
_told: set[tuple[str, str]] = set()
_WRITERS = keras.callbacks.ModelCheckpoint, keras.callbacks.OrbaxCheckpoint
_SAVERS = *_WRITERS, keras.callbacks.BackupAndRestore


def is_released(name: str) -> bool:
    """Whether a value of this name in logs, or in the name of a file, is released."""
    return name.startswith("val_") or name in _RELEASED


def show_released(callbacks: list[Any]) -> None:
    """Puts each callback that is not to see training metrics behind one that leaves them out."""
    callbacks[:] = [each if _sees_all(each) else _OfReleased(each) for each in callbacks]


def show_all(callbacks: list[Any]) -> None:
    """Undoes `show_released`, of a list that another run begins with."""
    callbacks[:] = [each.inner if isinstance(each, _OfReleased) else each for each in callbacks]


def _sees_all(callback: Any) -> bool:
    """Whether it is Keras' history or progress bar, or of this package; subclasses are not."""
    cls = type(callback)
    return cls in _SEE_ALL or cls.__module__.partition(".")[0] == "dp_sparse"


class ReleasedLogs(dict[str, Any]):
    """The released values of `logs`; a training metric is missing, and NaN if one insists.

    Args:
        logs: All values.
        reader: Who reads them, for a warning.
    """

    def __init__(self, logs: dict[str, Any], reader: str) -> None:
        super().__init__({name: value for name, value in logs.items() if is_released(name)})
        self._withheld, self._reader = logs.keys() - self.keys(), reader

    def __bool__(self) -> bool:
        return True  # or `logs or {}` would not know what is withheld

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dictionary."""
        self._tell(name)
        return super().get(name, default)

    def __missing__(self, name: str) -> float:
        if name not in self._withheld:
            raise KeyError(name)
        self._tell(name)
        return math.nan

    def _tell(self, name: str) -> None:
        if name not in self._withheld or (self._reader, name) in _told:
            return
        _told.add((self._reader, name))
        warnings.warn(
            f"{self._reader} asks for {name!r}, a training metric, and gets none: no epsilon "
            "covers it.\n"
            "Use a val_ metric, or accept the leak with "
            "PrivacyReport(diagnostics='non_private') among the callbacks.",
            stacklevel=5,
        )


class _OfReleased(keras.callbacks.Callback):
    """Hands each call on to another callback, with released logs; what that adds, all see."""

    def __init__(self, inner: keras.callbacks.Callback) -> None:
        super().__init__()
        self.inner = inner

    def set_params(self, params: Any) -> None:
        self.inner.set_params(params)

    def set_model(self, model: Any) -> None:
        self.inner.set_model(model)


def _handing_on(name: str) -> Callable[..., None]:
    def hand_on(self: _OfReleased, *args: Any, **kwargs: Any) -> None:
        getattr(self.inner, name)(*args, **kwargs)

    return hand_on


def _showing_released(name: str) -> Callable[..., None]:
    signature = inspect.signature(getattr(keras.callbacks.Callback, name))

    def hand_on(self: _OfReleased, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        logs = given.arguments.get("logs")
        if logs is None:
            getattr(self.inner, name)(*given.args[1:])
            return
        shown = ReleasedLogs(logs, type(self.inner).__name__)
        given.arguments["logs"] = shown
        try:
            getattr(self.inner, name)(*given.args[1:])
        finally:
            logs.update(shown)

    return hand_on


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_"):
        _make = _showing_released if _name in _WITH_METRICS else _handing_on
        setattr(_OfReleased, _name, _make(_name))


def install_callback_guard() -> None:
    """Wraps `CallbackList.on_train_begin`, once: there all callbacks of a run are known.

    The list itself may have been made before the model was compiled.
    """
    original = keras.callbacks.CallbackList.on_train_begin
    if hasattr(original, "_dp_sparse_original"):
        return

    @functools.wraps(original)
    def on_train_begin(self: keras.callbacks.CallbackList, logs: Any = None) -> None:
        model = self._model
        show_all(self.callbacks)
        if isinstance(getattr(model, "optimizer", None), PrivateOptimizer):
            _put_checkpoint_first(self.callbacks, model.optimizer)
            _put_backup_first(self.callbacks)
            _refuse_unsafe_logs(self.callbacks)
            accepted = any(_accepts_all(callback) for callback in self.callbacks)
            if not accepted:
                _refuse_metrics_in_files(self.callbacks)
            plan_steps.give_to_epochs(model, self)
            if model.optimizer.delays_noise:
                flush_hooks.guard_callbacks(self.callbacks, model)
            if not accepted:
                show_released(self.callbacks)
                _put_names_first(self.callbacks, model)
        original(self, logs)

    on_train_begin._dp_sparse_original = original  # type: ignore[attr-defined]
    keras.callbacks.CallbackList.on_train_begin = on_train_begin


def _accepts_all(callback: Any) -> bool:
    return isinstance(callback, PrivacyReport) and callback.diagnostics == "non_private"


def _refuse_metrics_in_files(callbacks: list[Any]) -> None:
    """Raises PrivacyError for files that would hold training metrics, or have them in their names.

    Found by the names of the attributes of Keras' callbacks, which others also use.
    """
    for callback in callbacks:
        parts = string.Formatter().parse(str(getattr(callback, "filepath", "")))
        names = [name for _, name, _, _ in parts if name and not is_released(name)]
        wrong, fix = "", "Use a val_ metric"
        if names:
            wrong = f"no training metric in the name of its file, got {sorted(names)[0]!r}"
        elif _saves_metrics(callback):
            wrong = "save_weights_only=True, got False, which saves sums of training metrics"
            fix = "Pass it, or use keras.callbacks.ModelCheckpoint"
        if wrong:
            raise PrivacyError(
                f"Expected {type(callback).__name__} with {wrong}: no epsilon covers them.\n{fix}, "
                "or accept the leak with PrivacyReport(diagnostics='non_private') among the "
                "callbacks."
            )


def _saves_metrics(callback: Any) -> bool:
    orbax = isinstance(callback, keras.callbacks.OrbaxCheckpoint)
    return orbax and not callback.save_weights_only


def _put_names_first(callbacks: list[Any], model: keras.Model) -> None:
    names = _TrainingNames()
    names.set_model(model)
    callbacks.insert(0, names)


def _put_checkpoint_first(callbacks: list[Any], optimizer: PrivateOptimizer) -> None:
    """So that whatever others write at the end of an epoch is covered by it.

    Raises:
        PrivacyError: There are two, the one that restored the run is missing, or another callback
            saves weights by itself.
    """
    own = [callback for callback in callbacks if isinstance(callback, PrivateCheckpoint)]
    if not own:
        if checkpointed_steps_of(optimizer) is not None:
            raise PrivacyError(
                "Expected the PrivateCheckpoint that restored this run among the callbacks of fit, "
                "got none: steps would be seen that run again if the process is killed. Pass it."
            )
        return
    others = [c for c in callbacks if isinstance(c, _SAVERS)] + own[1:]
    if others:
        raise PrivacyError(
            f"Expected PrivateCheckpoint to be the only callback that saves weights, got "
            f"{type(others[0]).__name__} beside it, which would publish steps that it does not "
            "know of: leave it out, or use it without PrivateCheckpoint."
        )
    callbacks.remove(own[0])
    callbacks.insert(0, own[0])


def _put_backup_first(callbacks: list[Any]) -> None:
    """So that a killed run resumes from the last weights that another callback saved.

    Raises:
        PrivacyError: Another callback saves weights at other steps.
    """
    backups = [c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)]
    for backup in backups:
        for writer in callbacks:
            if isinstance(writer, _WRITERS) and writer.save_freq != backup.save_freq:
                raise PrivacyError(
                    f"Expected {type(writer).__name__} to save when BackupAndRestore does, got "
                    f"save_freq={writer.save_freq!r} beside save_freq={backup.save_freq!r}: a "
                    "killed run would repeat steps that it has already published. Use the same "
                    "save_freq, or dp_sparse.PrivateCheckpoint in place of BackupAndRestore."
                )
        callbacks.remove(backup)
        callbacks.insert(0, backup)


def _refuse_unsafe_logs(callbacks: list[Any]) -> None:
    """Raises PrivacyError for a log with steps that may run again."""
    monitors = [callback for callback in callbacks if isinstance(callback, PrivacyMonitor)]
    savers = [callback for callback in callbacks if isinstance(callback, _SAVERS)]
    if monitors and savers:
        raise PrivacyError(
            f"Expected PrivacyMonitor without {type(savers[0]).__name__}, whose files a run can go "
            "on from behind the log's back, so that steps in the log would run again: use "
            "PrivateCheckpoint, which the log waits for."
        )


class _TrainingNames(keras.callbacks.Callback):
    """Refuses training metrics with the names of released values, before other callbacks run."""

    _seen = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._seen = self._seen or bool(logs)
        _refuse_names(logs or {})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._seen:  # the loop has logs only at the end of epochs, without validation
            _refuse_names(logs or {})


def _refuse_names(logs: dict[str, Any]) -> None:
    wrong = sorted(name for name in logs if is_released(name))
    if wrong:
        raise PrivacyError(
            f"Expected training metrics whose names are not those of released values, got "
            f"{wrong[0]!r}: callbacks and reports would treat it as released. Rename the metric or "
            "the output."
        )
