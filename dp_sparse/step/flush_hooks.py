"""Makes everything that reads tables after training add the delayed noise first.

Between two steps of an optimizer that delays noise, a table in memory lacks noise on the rows that
no batch has looked up since, so it tells which rows were looked up. `fit` and `train_on_batch`
flush (add the delayed noise) when they end. The methods of a model that read its weights, and the
saving of layers that own tables, flush before they read; while they read, a step of another thread
waits. A callback that acts on batches could read a table without calling a method, and is refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer

_READERS = (
    "evaluate",
    "predict",
    "test_on_batch",
    "predict_on_batch",
    "save",
    "save_weights",
    "export",
    "get_weights",
    "get_state_tree",
)
_TRAINERS = ("fit", "train_on_batch")
_SAVES = "save_own_variables"
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def install(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Makes the methods of the model flush; `remove` undoes that."""
    for name in _READERS:
        setattr(model, name, _flushing_first(optimizer, getattr(model, name)))
    for name in _TRAINERS:
        setattr(model, name, _flushing_last(optimizer, getattr(model, name)))


def remove(model: keras.Model) -> None:
    """Flushes, and restores the methods of the model and its layers that were replaced."""
    for owner in (model, *model._flatten_layers(include_self=False)):
        for name in (*_TRAINERS, *_READERS, _SAVES):
            method = vars(owner).get(name)
            if hasattr(method, "_dp_sparse_flushes"):
                method._dp_sparse_flushes.flush()
                delattr(owner, name)


def guard_layers(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Makes each layer that owns a table flush whenever it is saved; idempotent."""
    tables = {id(table) for table in optimizer.tables}
    for layer in model._flatten_layers():
        owns = any(id(variable) in tables for variable in layer._trainable_variables)
        if owns and not hasattr(vars(layer).get(_SAVES), "_dp_sparse_flushes"):
            setattr(layer, _SAVES, _flushing_first(optimizer, getattr(layer, _SAVES)))


def guard_callbacks(callbacks: list[keras.callbacks.Callback], model: keras.Model) -> None:
    """Refuses callbacks that could read a table between two steps, and adds one that flushes.

    Raises:
        PrivacyError: A callback acts on batches, is neither Keras' own nor this package's, and does
            not have `reads_weights = False`.
    """
    for callback in callbacks:
        if any(_may_read_weights(callback, hook) for hook in _BATCH_HOOKS):
            raise PrivacyError(
                f"{type(callback).__name__} acts on every batch, when tables lack noise that this "
                "optimizer delays. Let it act at the end of epochs, give it reads_weights = False "
                "if it never reads the model's weights, or use DPSGDOptimizer."
            )
    flush = _FlushAtEpochEnd()
    flush.set_model(model)
    callbacks.insert(0, flush)


class _FlushAtEpochEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.optimizer.flush()


def _flushing_first(optimizer: PrivateOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def flush_and_call(*args: Any, **kwargs: Any) -> Any:
        with optimizer.settled():
            return method(*args, **kwargs)

    flush_and_call._dp_sparse_flushes = optimizer  # type: ignore[attr-defined]
    return flush_and_call


def _flushing_last(optimizer: PrivateOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_and_flush(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            optimizer.flush()

    call_and_flush._dp_sparse_flushes = optimizer  # type: ignore[attr-defined]
    return call_and_flush


def _may_read_weights(callback: Any, hook: str) -> bool:
    """Whether a hook runs code of others that may read weights.

    `reads_weights = False` counts on the callback and on its own class. On a base class it says
    nothing of the methods of a subclass.
    """
    of_instance, cls = vars(callback), type(callback)
    default = getattr(keras.callbacks.Callback, hook)
    known = cls.__module__.partition(".")[0] in ("keras", "dp_sparse")
    inherited = not known and getattr(cls, hook, default) is not default
    acts = hook in of_instance or inherited  # on the instance, as in LambdaCallback
    return acts and bool(of_instance.get("reads_weights", vars(cls).get("reads_weights", True)))
