"""The judge of a model: before a step trains on a batch, it looks whether examples stay apart.

It runs beside the step, on the batch that training is about to take: the first three, the 257th,
the 2,049th and so on, and the first of each other signature. The first one, and those of a new
signature, get a whole check (`guards.isolation`). Nothing is read ahead: a stream that can be read
once loses no batch.

### Formal Guarantees
No step of a model is traced before a batch of its signature passed. A batch whose examples mix
raises PrivacyError before the step that would train on it is counted, and leaves every weight as
it was.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import PrivacyError, translated
from dp_sparse.guards import COUPLED, Isolation, RecordedPass
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Examples, batch_of, is_sampled
from dp_sparse.training.building import build_for
from dp_sparse.training.forward_backward import led_by_batch, losses_with_padding
from dp_sparse.training.nan_in_bfloat16 import refuse_nan
from dp_sparse.training.traced_pass import same_seeds
from dp_sparse.training.wrapped_ids import refuse_wrapped

_Signature = tuple[tf.TensorSpec, ...]
_FIRST, _LATER, _APART = 3, 256, 8  # the first batches, then after 256, 2,048, … of them


class Schedule:
    """Which batches of a run are looked at.

    Attributes:
        batches: How many the run had.
        checks: How many of them were looked at.
    """

    def __init__(self) -> None:
        self.batches = self.checks = self._due_at = 0

    def due(self) -> bool:
        """Whether the next batch is to be looked at."""
        return self.batches >= self._due_at

    def passed(self) -> None:
        """The next batch was looked at."""
        self.checks += 1
        later = _LATER * _APART ** max(self.checks - _FIRST, 0)
        self._due_at = self.batches + 1 if self.checks < _FIRST else later


class Preflight:
    """The checks of one compiled model.

    Args:
        model: The model.
        optimizer: Its private optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: PrivateOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.restart()

    def restart(self) -> None:
        """The step will be traced anew, and may then hold what no check has seen."""
        optimizer = self._optimizer
        self.schedule = Schedule()
        self._signatures: list[_Signature] = []  # of what was checked
        self._passed: list[_Signature] = []  # for each replica, also without examples
        self._isolation = isolation_of(
            self._model,
            optimizer.examples_in_memory,
            own_size=optimizer.compiles,
            at_once=optimizer.microbatch_size,
        )

    def ahead(self, batches: Any, steps: int) -> Any:
        """The same batches, of which the next was looked at if that is due.

        Args:
            batches: An iterator over what `fit` takes.
            steps: How many of them come in one call.
        """
        signature = getattr(batches, "element_spec", None)
        if signature is not None and not self._is_due(signature):
            self.schedule.batches += steps
            return batches
        batch = next(batches)
        self.look_at(batch)
        self.schedule.batches += steps - 1
        return itertools.chain([batch], batches)

    def look_at(self, data: Any) -> None:
        """Checks a batch that training is about to take, if that is due.

        Raises:
            PrivacyError: Its examples are not apart.
        """
        if is_sampled(data):
            if self._is_due(data):
                self._check(data)
            self.schedule.batches += 1

    def require(self, data: Any) -> None:
        """Raises PrivacyError unless a batch of this signature passed; for a step being traced.

        A batch without examples passes: it proves nothing, and trains nothing.
        """
        traced = _signature(data)
        if not any(_compatible(traced, passed) for passed in self._passed):
            raise PrivacyError(
                "Expected a batch that was looked at before its step is traced, got a step that is "
                "traced inside of a function of yours.\nTrain with fit or train_on_batch, or call "
                "dp_sparse.preflight(model, batch) before your function takes the batch."
            )

    def _is_due(self, data: Any) -> bool:
        return self.schedule.due() or _signature(data) not in self._signatures

    def _check(self, data: Any) -> None:
        new = _signature(data) not in self._signatures
        parts = [_of_replica(self._model, data, number) for number in range(_replicas(self._model))]
        there = [np.any(part[2]["present"].numpy() > 0) for part in parts]
        for part in itertools.compress(parts, there):
            self._check_part(batch_of(part).examples, whole=new)
        self._passed.append(_signature(parts[0]))
        if any(there):
            self.schedule.passed()
            self._signatures.append(_signature(data))

    def _check_part(self, examples: Examples, whole: bool) -> None:
        """Checks what one replica has of a batch."""
        model, optimizer = self._model, self._optimizer
        examples = examples._replace(x=clipping.named_inputs(model, examples.x))
        with translated():
            if not optimizer.built:
                with model.distribute_strategy.scope():
                    build_for(model, optimizer, examples)
            examples = refuse_wrapped(model, refuse_nan(model, examples))
            found = self._isolation.coupled(
                *arrays(examples, trimmed=not optimizer.compiles),
                seed=self.schedule.batches,
                whole=whole,
            )
        if found is not None:
            raise PrivacyError(COUPLED.format(found))


def preflight(model: keras.Model, batch: Any) -> None:
    """Looks whether the examples of a batch stay apart, if that is due; for loops of your own.

    `fit`, `train_on_batch`, `distribution.train` and an eager `model.train_step(batch)` do it by
    themselves. A step that is traced in a `tf.function` of yours needs it for the first batch, and
    better for each.

    Args:
        model: Compiled with a private optimizer.
        batch: Of the plan's sampler.

    Raises:
        PrivacyError: They do not; the model is not private.
    """
    own = getattr(getattr(model, "train_step", None), "preflight", None)
    if own is None:
        raise PrivacyError(
            f"Expected a model compiled with a private optimizer, got {model.name}: pass "
            "dp_sparse.DPAdaFESTOptimizer(...) to compile."
        )
    own.look_at(batch)


def isolation_of(
    model: keras.Model, batch_capacity: int, own_size: bool = False, at_once: int | None = None
) -> Isolation:
    """The checks of a model's pass over `Examples`.

    Args:
        model: With a loss, or without one if the examples have no labels either.
        batch_capacity: The largest batch, for the fallback's memory budget.
        own_size: As in `Isolation`.
        at_once: As in `Isolation`.
    """
    recorded = recorded_pass(model, batch_capacity)
    return Isolation(model, recorded, Examples.of_data, own_size, at_once)


def recorded_pass(model: keras.Model, batch_capacity: int) -> RecordedPass:
    """The model's pass over `Examples`, with the same masks at each call."""

    def recorded(examples: Examples) -> tuple[clipping.Used, tf.Tensor, bool]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, examples.x, tape, batch_capacity, same_seeds)
            losses = _losses(model, examples, recording.outputs)
            total = tf.reduce_sum(losses)
        with clipping.guarded():
            uses = recording.uses(tape.gradient(total, recording.targets))
        losses = led_by_batch(uses, losses, examples.present)
        return uses, losses, recording.seeds_drawn > 0

    return recorded


def arrays(examples: Examples, trimmed: bool) -> tuple[Examples, np.ndarray]:
    """Examples as arrays, and which of them are there.

    Args:
        examples: The examples.
        trimmed: Whether to leave out the padding after the last real one, but for two examples.
    """
    examples = tf.nest.map_structure(_array, examples)
    if trimmed:
        last = np.max(np.flatnonzero(examples.present > 0), initial=0)
        examples = tf.nest.map_structure(lambda leaf: leaf[: max(last + 1, 2)], examples)
    return examples, examples.present


def _array(leaf: tf.Tensor) -> np.ndarray:
    return np.array(leaf.numpy(), copy=None)


def _losses(model: keras.Model, examples: Examples, outputs: Any) -> tf.Tensor:
    """Those of the model, or without labels a loss that depends on all of each output."""
    if tf.nest.flatten(examples.y):
        return losses_with_padding(model, examples, outputs)[0]

    def made_up(output: tf.Tensor) -> tf.Tensor:
        values = tf.reshape(tf.cast(output, tf.float32), [tf.shape(output)[0], -1])
        weights = tf.cos(tf.range(tf.cast(tf.shape(values)[1], tf.float32)))
        return tf.reduce_sum(values * weights, 1)

    return tf.add_n([made_up(output) for output in tf.nest.flatten(outputs)])


def _replicas(model: keras.Model) -> int:
    """How many replicas of the model this process has."""
    strategy = model.distribute_strategy
    return len(strategy.extended.worker_devices) if strategy.num_replicas_in_sync > 1 else 1


def _of_replica(model: keras.Model, data: Any, number: int) -> Any:
    """What one replica of this process has of a batch."""

    def own(leaf: Any) -> tf.Tensor:
        found = model.distribute_strategy.experimental_local_results(leaf)
        return found[min(number, len(found) - 1)]  # one for all, which the step refuses

    return tf.nest.map_structure(own, data)


def _signature(data: Any) -> _Signature:
    """Shapes without the batch, and dtypes, of what a step takes."""
    return tuple(
        tf.TensorSpec(leaf.shape[1:], leaf.dtype)
        for leaf in tf.nest.flatten(data, expand_composites=True)
    )


def _compatible(traced: Iterable[tf.TensorSpec], passed: Iterable[tf.TensorSpec]) -> bool:
    pairs = list(itertools.zip_longest(traced, passed))
    return all(
        None not in pair
        and pair[0].dtype == pair[1].dtype
        and pair[0].shape.is_compatible_with(pair[1].shape)
        for pair in pairs
    )
