"""Callbacks of a private run get logs of released values alone.

No ε covers training loss and metrics. Keras' history and progress bar keep them in the process and
on the console; every other callback sees what is left: validation metrics, ε, the learning rate.
One that asks for a training metric is told once that there is none to see.

### Formal Guarantees
What a callback gets through `logs` is a function of released values, and of validation metrics,
which no ε covers if held-out examples are private. A callback that reads `model.metrics`, or the
history, reads training metrics.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import keras

_RELEASED = ("epoch", "batch", "epsilon", "epsilon_not_guaranteed", "learning_rate")
_SEE_ALL = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
_WITH_METRICS = ("on_batch_end", "on_train_batch_end", "on_epoch_end", "on_train_end")


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


_told: set[tuple[str, str]] = set()


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
