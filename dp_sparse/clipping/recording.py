"""One forward pass in which every layer call with trainable variables is recorded.

Nothing else is possible. Each such layer is tapped: its `call` is replaced on the instance while
the pass runs. A guard fails closed: a trainable variable read outside its layer's tap, a
non-trainable one written (seed generators apart), and a loss added on the way are refused, since
what was not measured could not be clipped.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.coverage import tapped_layers
from dp_sparse.clipping.float_ids import refuse_rounded_ids
from dp_sparse.clipping.graph_guard import guarded, own_operations, recorded_operations
from dp_sparse.clipping.named_inputs import taken_by_name
from dp_sparse.clipping.rules import Rule
from dp_sparse.clipping.tap import BeforeLookup, Record, Tap
from dp_sparse.clipping.uses import Rows, Tied, Use, joined
from dp_sparse.clipping.variable_guard import Seeds, VariableGuard
from dp_sparse.core import UnsupportedLayerError, replaced_call, replicas


@dataclasses.dataclass(frozen=True)
class Recording:
    """A forward pass on its tape.

    Attributes:
        outputs: The model's predictions.
        records: One per tapped call, in the order of the calls.
        seeds_drawn: How many random seeds the pass drew, for dropout and the like.
    """

    outputs: Any
    records: list[Record]
    seeds_drawn: int

    @property
    def targets(self) -> list[tf.Tensor]:
        """The tensors whose cotangents `uses` needs, in its order."""
        return [target for record in self.records for target in record.targets]

    def uses(self, cotangents: list[tf.Tensor | None]) -> list[tuple[keras.Variable, Use]]:
        """Each trained variable's joined use, from the cotangents of `targets`.

        Raises:
            UnsupportedLayerError: A target has no cotangent, or a variable was used both as a table
                and as a matrix.
        """
        by_variable: dict[int, tuple[keras.Variable, list[Use]]] = {}
        remaining = iter(cotangents)
        for record in self.records:
            own = [_as_float(next(remaining), target, record.path) for target in record.targets]
            for variable, use in record.uses_of(own):
                by_variable.setdefault(id(variable), (variable, []))[1].append(use)
        return [(variable, _joined(variable, uses)) for variable, uses in by_variable.values()]


def record(
    model: keras.Model,
    x: Any,
    tape: tf.GradientTape,
    batch_capacity: int,
    seeds: Seeds | None = None,
    before_lookup: BeforeLookup | None = None,
) -> Recording:
    """Runs `model(x, training=True)` on `tape`, every layer call recorded.

    Args:
        model: The model, built or not.
        x: Its inputs, each `[batch, ...]`.
        tape: A tape that watches nothing by itself.
        batch_capacity: The largest batch there can be, for what must be refused by its memory.
        seeds: The state of a seed generator at each of its uses, instead of Keras' own, which is
            public: masks must not tell where an example stood in its batch.
        before_lookup: Called with each table and the ids whose rows are about to be read.

    Raises:
        UnsupportedLayerError: With every layer whose per-example gradients cannot be had, its path
            and the fix.
    """
    taps = tapped_layers(model)
    guard = VariableGuard(model, seeds)
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(guarded(recorded=lambda: model.trainable_variables))
        stack.enter_context(replicas.apart())
        stack.enter_context(_variable_scope_kept())
        stack.enter_context(taken_by_name(model))
        for layer, rule in taps:
            tap = Tap(
                layer, tape, records, batch_capacity, guard.seeds_drawn, _settling(before_lookup)
            )
            stack.enter_context(_tapped(layer, rule, tap, guard))
        with guard:
            start = len(_operations())
            outputs = model(x, training=True)
        guard.refuse()  # first, since it names variables
        refuse_rounded_ids(model, _operations()[start:])
    return Recording(outputs, records, guard.seeds_drawn())


@contextlib.contextmanager
def _variable_scope_kept() -> Iterator[None]:
    """Undoes what `tf.map_fn` leaves behind when what it calls raises, as a refused layer does.

    Until then no `tf.distribute` strategy could be used in this process.
    """
    if tf.executing_eagerly():
        yield
        return
    scope = tf.compat.v1.get_variable_scope()
    caching_device = scope.caching_device
    try:
        yield
    finally:
        scope.set_caching_device(caching_device)


def _operations() -> list[tf.Operation]:
    """The operations of the graph that is being traced."""
    return [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()


def _tapped(
    layer: keras.layers.Layer, rule: Rule, tap: Tap, guard: "VariableGuard"
) -> contextlib.AbstractContextManager[None]:
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if guard.covers_all:
            return original(*args, **kwargs)
        with guard.inside(layer, rule) as covered, recorded_operations(covered):
            return rule(layer, original, tap, *args, **kwargs)

    return replaced_call(layer, call)


def _as_float(cotangent: tf.Tensor | None, target: tf.Tensor, path: str) -> tf.Tensor:
    """Float32, and of the static shape of its target, which gradients of `tf.split` forget."""
    if cotangent is None:
        raise UnsupportedLayerError(
            f"{path}: its output does not reach the loss, or its gradient is hidden "
            "(rematerialisation). Give its output a loss in compile, freeze it with "
            "trainable=False, or remove keras.RematScope."
        )
    value = tf.cast(tf.convert_to_tensor(cotangent), tf.float32)
    value.set_shape(target.shape)
    return value


def _joined(variable: keras.Variable, uses: list[Use]) -> Use:
    if any(isinstance(use, Tied) for use in uses):
        uses = [Tied.of_lookups(variable, use) if isinstance(use, Rows) else use for use in uses]
    try:
        return joined(uses)
    except ValueError as error:
        raise UnsupportedLayerError(
            f"{variable.path}: {error}. Give each use a variable of its own."
        ) from None


def _settling(before_lookup: BeforeLookup | None) -> BeforeLookup:
    def settle(table: keras.Variable, row_ids: tf.Tensor) -> None:
        if before_lookup is not None:
            with own_operations():  # which write on purpose
                before_lookup(table, row_ids)

    return settle
