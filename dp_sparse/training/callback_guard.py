"""Which callbacks may run in private training: those that leak training metrics are refused.

No ε covers training loss and metrics, and the variables in which Keras sums them up. Every callback
class of Keras has a rule here, and one without a rule is refused. For a class of others to which
Keras gives training metrics there is one warning, or an error if the run is strict.
"""

import dataclasses
import functools
import string
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.training import flush_hooks, plan_steps
from dp_sparse.training.callbacks import PrivacyReport
from dp_sparse.training.checkpoint import PrivateCheckpoint
from dp_sparse.training.covered_steps import covered_steps_of
from dp_sparse.training.flush_hooks import own_method_reads
from dp_sparse.training.monitor import PrivacyMonitor

_WRITERS = keras.callbacks.ModelCheckpoint, keras.callbacks.OrbaxCheckpoint
_SAVERS = *_WRITERS, keras.callbacks.BackupAndRestore
_HOOKS_WITH_METRICS = ("on_batch_end", "on_train_batch_end", "on_epoch_end", "on_train_end")
_RELEASED = (
    "epoch",
    "batch",
    "epsilon",
    "epsilon_not_guaranteed",
    "learning_rate",
)  # in logs and names of files
_VALIDATE = "Use a val_ metric (no epsilon covers private held-out examples either)"
_MONITOR = (
    "Use dp_sparse.PrivacyMonitor(folder) instead (epsilon and validation metrics, for TensorBoard "
    "and as lines of JSON)"
)


@dataclasses.dataclass(frozen=True)
class Leak:
    """What a callback does that no ε covers.

    Attributes:
        what: A verb and its object.
        fix: What to do instead, in the imperative.
    """

    what: str
    fix: str


Rule = Callable[[Any], Leak | None]


def _none(callback: Any) -> None:
    del callback


def _always(what: str, fix: str) -> Rule:
    return lambda callback: Leak(what, fix)


def _unknown(name: str) -> Rule:
    return _always(f"may write training metrics or steer by them ({name} has no rule)", _MONITOR)


def _uses_a_training_metric(callback: Any) -> Leak | None:
    """Found by the names of the attributes of Keras' callbacks, which others also use."""
    monitor = getattr(callback, "monitor", None)
    steers = getattr(callback, "save_best_only", True)
    if isinstance(monitor, str) and steers and not _is_released(monitor):
        return Leak(f"steers training by the training metric monitor={monitor!r}", _VALIDATE)
    parts = string.Formatter().parse(str(getattr(callback, "filepath", "")))
    names = sorted(name for _, name, _, _ in parts if name and not _is_released(name))
    if not names:
        return None
    return Leak(f"writes the training metric {names[0]!r} into a file name", _VALIDATE)


def _saves_metrics(callback: Any) -> Leak | None:
    if getattr(callback, "save_weights_only", False):
        return None
    return Leak(
        "writes the variables of training metrics into its files",
        "Use keras.callbacks.ModelCheckpoint, which leaves them out, or save_weights_only=True",
    )


RULES: dict[str, Rule] = {
    "BackupAndRestore": _none,  # saves weights, slots, steps spent, epoch and batch numbers
    "Callback": _uses_a_training_metric,  # the base class, so this rule is for all classes
    "CallbackList": _none,  # its callbacks are checked when training begins
    "CSVLogger": _always("writes training metrics into a file", _MONITOR),
    "EarlyStopping": _none,  # only the rule of Callback
    "History": _none,  # stays in the process
    "LambdaCallback": _none,  # its functions count as code of others
    "LearningRateScheduler": _none,  # gets the epoch and the learning rate
    "ModelCheckpoint": _none,  # only the rule of Callback; saves weights, slots, steps spent
    "MonitorCallback": _none,  # only the rule of Callback
    "OrbaxCheckpoint": _saves_metrics,
    "ProgbarLogger": _none,  # writes to the console
    "ReduceLROnPlateau": _none,  # only the rule of Callback
    "RemoteMonitor": _always("sends training metrics away", _MONITOR),
    "SwapEMAWeights": _none,  # averages of released weights
    "TensorBoard": _always("writes training metrics into a file", _MONITOR),
    "TerminateOnNaN": _always(
        "steers training by the training loss",
        "Leave it out: examples that are not finite are zeroed",
    ),
}
"""The rule of each Keras class by its name; a subclass has the rules of all its bases."""


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
        if isinstance(getattr(model, "optimizer", None), PrivateOptimizer):
            _put_checkpoint_first(self.callbacks, model.optimizer)
            _put_backup_first(self.callbacks)
            _refuse_unsafe_logs(self.callbacks)
            _guard(self.callbacks, model)
            plan_steps.give_to_epochs(model, self)
            if model.optimizer.delays_noise:
                flush_hooks.guard_callbacks(self.callbacks, model)
        original(self, logs)

    on_train_begin._dp_sparse_original = original  # type: ignore[attr-defined]
    keras.callbacks.CallbackList.on_train_begin = on_train_begin


def _guard(callbacks: list[Any], model: keras.Model) -> None:
    wanted = {c.diagnostics for c in callbacks if isinstance(c, PrivacyReport)}
    if "non_private" in wanted and "strict" not in wanted:
        return
    for callback in callbacks:
        for leak in _leaks(callback):
            raise PrivacyError(
                f"{type(callback).__name__} {leak.what}, which no epsilon covers. {leak.fix}, or "
                "accept the leak with PrivacyReport(diagnostics='non_private') among the callbacks."
            )
        reads = functools.partial(own_method_reads, callback, what="reads_training_metrics")
        hooks = [name for name in _HOOKS_WITH_METRICS if reads(name)]
        if hooks:
            _tell(_name_of(callback, hooks), "strict" in wanted)
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
        if covered_steps_of(optimizer) is not None:
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
    """Raises PrivacyError for a log with steps that may run again, or more than the run allows."""
    monitors = [callback for callback in callbacks if isinstance(callback, PrivacyMonitor)]
    savers = [callback for callback in callbacks if isinstance(callback, _SAVERS)]
    if monitors and savers:
        raise PrivacyError(
            f"Expected PrivacyMonitor without {type(savers[0]).__name__}, whose files a run can go "
            "on from behind the log's back, so that steps in the log would run again: use "
            "PrivateCheckpoint, which the log waits for."
        )
    strict = any(isinstance(c, PrivacyReport) and c.diagnostics == "strict" for c in callbacks)
    if strict and any(monitor.diagnostics == "non_private" for monitor in monitors):
        raise PrivacyError(
            "Expected PrivacyMonitor(diagnostics='private') beside "
            "PrivacyReport(diagnostics='strict'), got diagnostics='non_private': leave out either."
        )


def _leaks(callback: Any) -> Iterator[Leak]:
    for cls in type(callback).__mro__:
        if cls.__module__.partition(".")[0] in ("keras", "tf_keras"):
            leak = RULES.get(cls.__name__, _unknown(cls.__name__))(callback)
            if leak is not None:
                yield leak


def _name_of(callback: Any, hooks: list[str]) -> str:
    cls = type(callback)
    functions = [getattr(vars(callback).get(hook), "__qualname__", None) for hook in hooks]
    given = ", ".join(f"{h}={f}" for h, f in zip(hooks, functions, strict=True) if f)
    return f"{cls.__module__}.{cls.__qualname__}" + (f"({given})" if given else "")


_told: set[str] = set()


def _tell(name: str, strict: bool) -> None:
    """Warns of a callback, once in a process, or refuses it."""
    said = (
        f"{name} gets training metrics, which no epsilon covers: it must not write them to a "
        "file, send them away or steer training by them. Give its class reads_training_metrics = "
        "False if it never reads them"
    )
    if strict:
        raise PrivacyError(
            f"{said}, use dp_sparse.PrivacyMonitor(folder) instead, or leave out "
            "diagnostics='strict'."
        )
    if name in _told:
        return
    _told.add(name)
    warnings.warn(f"{said}. PrivacyReport(diagnostics='strict') refuses it.", stacklevel=4)


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
    wrong = sorted(name for name in logs if _is_released(name))
    if wrong:
        raise PrivacyError(
            f"Expected training metrics whose names are not those of released values, got "
            f"{wrong[0]!r}: callbacks and reports would treat it as released. Rename the metric or "
            "the output."
        )


def _is_released(name: str) -> bool:
    return name.startswith("val_") or name in _RELEASED
