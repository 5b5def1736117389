"""Checks that examples do not affect one another, before a step trains on them.

It runs beside the step, on the batch that training is about to take: the first three, the 257th,
the 2,049th and so on, and the first of each other signature. The first one, and those of a new
signature, get a whole check (`guards.isolation`). Nothing is read ahead: a stream that can be read
once loses no batch.

### Formal Guarantees
No step of a model is traced before a batch of its signature passed, or had no example. A batch
whose examples affect one another raises PrivacyError before the step that would train on it is
counted, and leaves every weight as it was.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import PrivacyError, translated
from dp_sparse.guards import COUPLED, Isolation, RecordedPass
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Examples, batch_of, is_sampled
from dp_sparse.step.building import build_for
from dp_sparse.step.environment import refuse_nan
from dp_sparse.step.forward_backward import led_by_batch, losses_of
from dp_sparse.step.loss_kind import measure
from dp_sparse.step.own_loss import forget, has_own_loss, own_loss_of
from dp_sparse.step.traced_pass import uniforms_by
from dp_sparse.step.unsupported import refuse_wrapped

_Signature = tuple[Any, tuple[tf.TensorSpec, ...]]  # names, and a specification of each leaf
_FIRST, _LATER, _APART = 3, 256, 8  # the first batches, then after 256, 2,048, … of them


class Schedule:
    """Which batches of a run are checked.

    Attributes:
        batches: How many the run had.
        checks: How many of them were checked because they were due.
    """

    def __init__(self) -> None:
        self.batches = self.checks = self._due_at = 0

    def due(self, within: int = 1) -> bool:
        """Whether one of the next so many batches is to be checked."""
        return self.batches + within > self._due_at

    @property
    def turns_whole(self) -> bool:
        """Whether the check that is due takes whole batches: the first, and the first later one.

        By then weights that began as zeros, and hid what is behind them, have been trained.
        """
        return self.checks in (0, _FIRST)

    def passed(self) -> None:
        """Records that the next batch was checked, since it was due."""
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
        """Forgets all checks, since the step will be traced again."""
        self.schedule = Schedule()
        self._signatures: set[_Signature] = set()  # of what was checked
        self._passed: set[_Signature] = set()  # for each replica, also without examples
        self._traced: set[_Signature] = set()
        forget(self._model)
        self._isolation = self._made_anew()

    def _made_anew(self) -> Isolation:
        optimizer = self._optimizer
        return isolation_of(
            self._model,
            optimizer.examples_in_memory,
            own_size=optimizer.compiles,
            at_once=optimizer.microbatch_size,
        )

    def ahead(self, batches: Any, steps: int) -> Any:
        """The same batches; if a check is due among the next ones, each is looked at as it comes.

        Args:
            batches: An iterator over what `fit` takes.
            steps: How many of them come in one call.
        """
        specs = getattr(batches, "element_spec", None)
        known = specs is not None and _is_among(_signature(specs), self._signatures)
        if self.schedule.due(steps) or not known:
            return self._looked_at(batches)
        self.schedule.batches += steps
        return batches

    def _looked_at(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.look_at(batch)
            yield batch

    def look_at(self, data: Any) -> None:
        """Checks a batch that training is about to take, if that is due.

        Raises:
            PrivacyError: Its examples are not apart.
        """
        if is_sampled(data):
            if self.schedule.due() or _signature(data) not in self._signatures:
                self._check(data)
            self.schedule.batches += 1

    def require(self, data: Any) -> None:
        """Raises PrivacyError unless a batch of this signature passed; for a step being traced.

        A batch without examples passes: it proves nothing, and trains nothing. Where a step of one
        signature is traced again, the next batch gets a whole check, since the trace may hold what
        no check has seen.
        """
        traced = _signature(data)
        if traced in self._traced:
            self._signatures.clear()
        self._traced.add(traced)
        if not _is_among(traced, self._passed):
            raise PrivacyError(
                f"The step of {self._model.name} is traced for a batch that no check has seen "
                f"({', '.join(f'{spec.dtype.name}{[*spec.shape]}' for spec in traced[1])}).\n"
                "Train with fit or train_on_batch; in a tf.function of your own, call "
                "dp_sparse.preflight(model, batch) before it takes the batch."
            )

    def _check(self, data: Any) -> None:
        new, due = _signature(data) not in self._signatures, self.schedule.due()
        whole = new or (due and self.schedule.turns_whole)
        if new:  # the step may be traced anew, too
            self._isolation = self._made_anew()
        parts = [_of_replica(self._model, data, number) for number in range(_replicas(self._model))]
        there = [self._proves(batch_of(part).examples, whole, n) for n, part in enumerate(parts)]
        self._passed.update(map(_signature, parts))  # an odd capacity has parts of two sizes
        if any(there):
            self._signatures.add(_signature(data))
            if due:
                self.schedule.passed()

    def _proves(self, examples: Examples, whole: bool, replica: int) -> bool:
        """Checks what one replica has of a batch; returns whether it has an example."""
        if not np.any(np.asarray(examples.present) > 0):
            return False
        model, optimizer = self._model, self._optimizer
        examples = tf.nest.map_structure(tf.convert_to_tensor, examples)
        examples = examples._replace(x=clipping.named_inputs(model, examples.x))
        with translated():
            if not optimizer.built:
                with model.distribute_strategy.scope():
                    build_for(model, optimizer, examples)
            measure(model, examples, optimizer.examples_in_memory)
            examples = refuse_wrapped(model, refuse_nan(model, examples))
        given = arrays(examples, trimmed=not optimizer.compiles)
        refuse_coupled(self._isolation, *given, self.schedule.batches, whole, replica)
        return True


def preflight(model: keras.Model, batch: Any) -> None:
    """Checks that the examples of a batch do not affect one another, if a check is due.

    For loops of your own: `fit`, `train_on_batch`, `distribution.train` and an eager
    `model.train_step(batch)` do it by themselves. A step that is traced in a `tf.function` of yours
    needs it before the first batch, and better before each. Most calls cost nothing; a check costs
    a trace of the model, and then a few of its passes over the batch.

    Args:
        model: Compiled with a private optimizer.
        batch: A batch of the plan's sampler, `(x, y, weights)` with leaves `[capacity, ...]`.

    Raises:
        PrivacyError: Its examples affect one another, or the model has no private optimizer.
        ValueError: The batch is not of a sampler.
        BadExampleError: An id or a label out of range.

    Examples:
        >>> import dp_sparse, keras, numpy as np, tensorflow as tf
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> step = tf.function(model.train_step, autograph=False)
        >>> for batch in sampling.batches((np.ones((8, 1)), np.ones(8))):
        ...     dp_sparse.preflight(model, batch)
        ...     logs = step(batch)
        >>> int(model.optimizer.steps_spent)
        2
    """
    own = getattr(getattr(model, "train_step", None), "preflight", None)
    if own is None:
        raise PrivacyError(
            f"Expected a model compiled with a private optimizer, got {model.name}: pass "
            "dp_sparse.DPAdaFESTOptimizer(...) to compile."
        )
    if not is_sampled(batch):
        raise ValueError(
            f"Expected a batch of the plan's sampler, got {type(batch).__name__}: take it from "
            "plan.sampling.batches(dataset)."
        )
    own.look_at(batch)


def refuse_coupled(
    isolation: Isolation, given: Any, present: np.ndarray, seed: int, whole: bool, replica: int
) -> None:
    """Raises PrivacyError if examples affect one another; arguments as in `Isolation.coupled`."""
    with translated():
        found = isolation.coupled(given, present, seed, whole, replica)
    if found is not None:
        raise PrivacyError(COUPLED.format(found))


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

    def of_data(examples: Examples) -> Examples:
        """A loss of the model's own also sees weights, which a compiled loss takes one by one."""
        return examples.of_data(weights_too=has_own_loss(model))

    return Isolation(model, recorded, of_data, own_size, at_once)


def recorded_pass(model: keras.Model, batch_capacity: int) -> RecordedPass:
    """The model's pass over `Examples`."""

    def recorded(
        examples: Examples, seeds: clipping.Seeds
    ) -> tuple[clipping.Terms, tf.Tensor, bool]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            own = own_loss_of(model, examples)
            shared = uniforms_by(seeds)
            recording = clipping.record(
                model, examples.x, tape, batch_capacity, seeds, own_loss=own, shared_uniforms=shared
            )
            losses, total = _losses(model, examples, recording)
        with clipping.guarded():
            terms = recording.terms(tape.gradient(total, recording.targets))
        losses = led_by_batch(terms, losses, examples.present)
        return terms, losses, recording.seeds_drawn > 0

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
    return np.asarray(leaf.numpy())


def _losses(
    model: keras.Model, examples: Examples, recording: clipping.Recording
) -> tuple[tf.Tensor, tf.Tensor]:
    """Those of the model, or without labels some that depend on all of each output; their sum."""
    if tf.nest.flatten(examples.y) or recording.loss is not None:
        found = losses_of(model, examples, recording)
        return found.of_examples, found.total

    def made_up(output: tf.Tensor) -> tf.Tensor:
        values = tf.reshape(tf.cast(output, tf.float32), [tf.shape(output)[0], -1])
        weights = tf.cos(tf.range(tf.cast(tf.shape(values)[1], tf.float32)))
        return tf.reduce_sum(values * weights, 1)

    losses = tf.add_n([made_up(output) for output in tf.nest.flatten(recording.outputs)])
    return losses, tf.reduce_sum(losses)


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
    """Shapes and dtypes of what a step takes."""
    leaves = tf.nest.flatten(data, expand_composites=True)
    return _keys(data), tuple(tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves)


def _keys(nest: Any) -> Any:
    """The names of inputs, labels and weights."""
    if isinstance(nest, dict):
        return tuple((name, _keys(nest[name])) for name in sorted(nest))
    return tuple(map(_keys, nest)) if isinstance(nest, list | tuple) else ()


def _is_among(signature: _Signature, others: Iterable[_Signature]) -> bool:
    """Whether it is one of these, of which it may know less."""
    return any(_compatible(signature, other) for other in others)


def _compatible(signature: _Signature, other: _Signature) -> bool:
    pairs = list(itertools.zip_longest(signature[1], other[1]))
    return signature[0] == other[0] and all(
        None not in pair
        and pair[0].dtype == pair[1].dtype
        and pair[0].shape.is_compatible_with(pair[1].shape)
        for pair in pairs
    )
