"""The course of a training run beside its steps: epochs, callbacks, what the plan has left."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from dp_sparse.core import PrivacyError, key_bytes, translated, validate
from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer, private_optimizer_of
from dp_sparse.sampling import BatchPart, Sampling, new_nonce
from dp_sparse.step import environment
from dp_sparse.training import around_fit, rest_of_epoch, share_of_steps

Step = Callable[[], None]
Logs = Callable[[], dict[str, float]]


@around_fit()
def run(
    model: keras.Model,
    source: Any,
    begin: Callable[[int], tuple[Step, Logs]],
    epochs: int,
    steps_per_epoch: int | None,
    callbacks: Sequence[keras.callbacks.Callback],
    verbose: int,
) -> keras.callbacks.History:
    """Runs epochs of steps, as `fit` would.

    Args:
        model: Compiled with a private optimizer.
        source: What the batches are made of.
        begin: Given the step to begin with, after callbacks restored what they have, returns the
            function of one step and that of an epoch's logs.
        epochs: As in `train`.
        steps_per_epoch: As in `train`.
        callbacks: As in `train`.
        verbose: As in `train`.

    Raises:
        ValueError: More steps than the plan has left.
    """
    epochs = validate.positive_integer("epochs", epochs)
    model.stop_training = False
    callback_list = keras.callbacks.CallbackList(
        list(callbacks),
        add_history=True,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps_per_epoch,
        model=model,
    )
    model._initial_epoch = None  # an earlier run's
    callback_list.on_train_begin()  # may restore a checkpoint, and say from which epoch to go on
    first = model._initial_epoch or 0
    ended = _windows_ended(model)
    if first < epochs:
        _run_epochs(model, source, begin, range(first, epochs), steps_per_epoch, callback_list)
        _warn_of_no_window(model, ended)
    model.optimizer.finalize_variable_values(model.trainable_weights)
    callback_list.on_train_end()
    return model.history


def _windows_ended(model: keras.Model) -> int:
    own = model.optimizer
    return own.windows_ended if isinstance(own, DPAdaFESTOptimizer) else 0


def _warn_of_no_window(model: keras.Model, ended: int) -> None:
    """Warns if no window of selection has ended since these did, though steps were taken."""
    own = model.optimizer
    if isinstance(own, DPAdaFESTOptimizer) and own.window > 1 and own.windows_ended == ended:
        steps = min(2**ended, own.window)
        warnings.warn(
            f"This call ended no window: the next one has {steps} steps. The same rows train as "
            f"before, and the maps of this call are lost. Call it once for all steps (epochs=), "
            f"or set a smaller window than {own.window}.",
            stacklevel=2,
        )


def _run_epochs(
    model: keras.Model,
    source: Any,
    begin: Callable[[int], tuple[Step, Logs]],
    epochs: range,
    steps_per_epoch: int | None,
    callback_list: keras.callbacks.CallbackList,
) -> None:
    sampling = model.optimizer.plan.sampling
    first_step = sampling.resumed_at(source, int(model.optimizer.steps_spent.numpy()))
    left = sampling.steps - first_step
    steps_of_epochs = _steps_of_epochs(sampling, left, len(epochs), steps_per_epoch)
    step, logs = begin(first_step)
    for epoch, steps in zip(epochs, steps_of_epochs, strict=True):
        callback_list.set_params({**callback_list.params, "steps": steps})
        model.reset_metrics()
        callback_list.on_epoch_begin(epoch)
        _run_steps(model, step, steps, callback_list)
        callback_list.on_epoch_end(epoch, logs())
        if model.stop_training:
            break


def _run_steps(
    model: keras.Model, step: Step, steps: int, callback_list: keras.callbacks.CallbackList
) -> None:
    for index in range(steps):
        callback_list.on_train_batch_begin(index)
        environment.check(model.optimizer.compiles)
        with translated():
            step()
        callback_list.on_train_batch_end(index, {})
        if model.stop_training:
            break


def checked_optimizer(model: keras.Model) -> PrivateOptimizer:
    """The model's private optimizer.

    Raises:
        ValueError: It has none.
        PrivacyError: It delays noise.
    """
    optimizer = private_optimizer_of(model, "pass dp_sparse.DPAdaFESTOptimizer(...) to compile")
    if optimizer.delays_noise:
        raise PrivacyError(
            f"Expected an optimizer that noises at once, got {type(optimizer).__name__}: train "
            "with fit, on one device."
        )
    return optimizer


def whole_batch(sampling: Sampling, steps: int) -> BatchPart:
    """All rows of a new pass over a sampler, under a key of its own, after `steps` steps."""
    fresh = key_bytes(sampling.not_private_seed, "sampling", steps)
    key = int.from_bytes(fresh(16), "little")
    return BatchPart(0, sampling.batch_capacity, key, new_nonce(None))


def _steps_of_epochs(sampling: Sampling, left: int, epochs: int, wanted: int | None) -> list[int]:
    """As given; else those of epochs of the plan, as `fit` has them, or shares of what is left."""
    steps, each = [], sampling.steps_per_epoch
    of_plan = each is not None and epochs > 1 and round(epochs * each) < left
    for epoch in range(epochs):
        if wanted is not None:
            steps.append(wanted)
        elif of_plan:
            steps.append(rest_of_epoch(sampling, left - sum(steps), 1))
        else:
            steps.append(share_of_steps(left - sum(steps), epochs - epoch, 1))
    if min(steps) < 1 or sum(steps) > left:
        raise ValueError(
            f"Expected at most {left} steps, which the plan has left, and at least one an epoch, "
            f"got {sum(steps)} steps in {epochs} epochs: take fewer, or a plan calibrated for more."
        )
    return steps
