"""One forward pass in which every layer call with trainable variables is recorded.

Nothing else is possible. Each such layer is tapped: its `call` is replaced on the instance while
the pass runs. A guard fails closed: a trainable variable read outside its layer's tap, a
non-trainable one written (seed generators apart), and a loss added on the way are refused, since
what was not measured could not be clipped.

Whether the leading axis of all that is recorded is the batch, so that it tells examples apart.

A layer that folds positions into the batch axis has records `[batch · positions, ...]`. With one
example its norms would broadcast against the losses, and each position would be clipped by itself.

The variable guard: it refuses what a forward pass may not do with variables.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from dp_sparse.clipping import public_rows
from dp_sparse.clipping.gradient_terms import GradientTerm, Rows, Tied, fields_of, joined
from dp_sparse.clipping.graph_guard import guarded, own_operations, recorded_operations
from dp_sparse.clipping.layer_rules import embedding_tables, own_variables, tapped_layers
from dp_sparse.clipping.named_inputs import refuse_rounded_ids, taken_by_name
from dp_sparse.clipping.non_private_statistics import metric_variables
from dp_sparse.clipping.public_rows import SharedUniforms
from dp_sparse.clipping.rules import Rule, covers_inner_layers
from dp_sparse.clipping.tap import BeforeLookup, Record, Tap, is_stop_gradient_read
from dp_sparse.clipping.zero_weights import filled_weights
from dp_sparse.core import PrivacyError, UnsupportedLayerError, replaced_call, replicas, require

Seeds: TypeAlias = Callable[[int, str], tf.Tensor]  # of a number in the pass and a dtype, `[2]`
LossOfOutputs: TypeAlias = Callable[[Any], tf.Tensor]
_MEND = (
    "another axis was folded into that of the batch, or part of the batch left out. Keep the "
    "examples on the first axis: give layers [batch, positions, width], or use "
    "keras.layers.TimeDistributed"
)


class VariableGuard(keras.StatelessScope):
    """Sees each read and write of a Keras variable in a forward pass, and lets no write happen."""

    def __init__(self, model: keras.Model, seeds: Seeds | None) -> None:
        super().__init__(collect_losses=True)
        self.covers_all = False  # True while a rule runs that also records the layers inside
        self._seeds = seeds
        self._trainable = {id(variable) for variable in model.trainable_variables}
        self.read: dict[int, str] = {}  # trainable variables, where their rule records them
        self._of_metrics = {id(variable) for variable in metric_variables(model)}
        self._covered: dict[int, keras.Variable] = {}
        self._written: list[str] = []
        self._seeds_drawn = 0
        self._filled = filled_weights(model, embedding_tables(model))
        self._outside: list[str] = []
        self._statistics: list[str] = []

    @contextlib.contextmanager
    def inside(self, layer: keras.layers.Layer, rule: Rule) -> Iterator[list[keras.Variable]]:
        """Allows reading the variables that the layer's rule records, while its call runs.

        Gives them, and those of the calls that it is in.
        """
        before = self._covered, self.covers_all
        covers_all = covers_inner_layers(rule)
        own = layer.variables if covers_all else own_variables(layer)
        self._covered, self.covers_all = before[0] | {id(v): v for v in own}, covers_all
        try:
            yield [*self._covered.values()]
        finally:
            self._covered, self.covers_all = before

    def get_current_value(self, variable: keras.Variable) -> Any:
        """The value of a variable that Keras reads; a seed generator gets a new secret state."""
        if self._seeds is not None and _is_seed(variable):
            with own_operations():
                return self._seeds(self._seeds_drawn, variable.dtype)
        if id(variable) in self._trainable and not is_stop_gradient_read():
            if id(variable) in self._covered:
                self.read[id(variable)] = variable.path
            else:
                self._outside.append(variable.path)
        if id(variable) in self._of_metrics:
            self._statistics.append(variable.path)
        if id(variable) in self._filled:
            return self._filled[id(variable)]()
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Notes an assignment, which Keras reports here."""
        super().add_update(update)
        if _is_seed(update[0]):
            self._seeds_drawn += 1
        else:
            self._written.append(update[0].path)

    def seeds_drawn(self) -> int:
        """How many random seeds the pass has drawn so far."""
        return self._seeds_drawn

    def refuse(self) -> None:
        """Raises UnsupportedLayerError if the pass did what cannot be clipped."""
        problems = [
            (
                self._outside,
                "read outside the layer that owns it; call the layer instead of using its variable",
            ),
            (
                self._written,
                "written in the forward pass; running statistics are not private. Remove the "
                "layer's statistics",
            ),
            (
                self._statistics,
                "a metric's variable, which is not private, read in the forward pass. Leave it out",
            ),
            (
                ["add_loss"] if self.losses else [],
                "a loss over the whole batch; put it into loss= of compile",
            ),
        ]
        lines = [
            f"- {path}: {problem}." for paths, problem in problems for path in dict.fromkeys(paths)
        ]
        if lines:
            raise UnsupportedLayerError("Cannot train privately:\n" + "\n".join(lines))


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith("seed_generator_state")


@dataclasses.dataclass(frozen=True)
class Recording:
    """A forward pass on its tape.

    Attributes:
        outputs: The model's predictions.
        records: One per tapped call, in the order of the calls.
        seeds_drawn: How many random seeds the pass drew, for dropout and the like.
        read: The trainable variables that the pass read, as paths by id.
        loss: What the model's own loss gave; None without one.
    """

    outputs: Any
    records: list[Record]
    seeds_drawn: int
    read: Mapping[int, str]
    loss: tf.Tensor | None = None

    @property
    def targets(self) -> list[tf.Tensor]:
        """The tensors whose cotangents `terms` needs, in its order."""
        return [target for record in self.records for target in record.targets]

    def terms(
        self, cotangents: list[tf.Tensor | None]
    ) -> list[tuple[keras.Variable, GradientTerm]]:
        """Each trained variable's joined term, from the cotangents of `targets`.

        Raises:
            UnsupportedLayerError: A target has no cotangent, a variable was used both as a table
                and as a matrix, or one that was read has no term.
        """
        by_variable: dict[int, tuple[keras.Variable, list[GradientTerm]]] = {}
        remaining = iter(cotangents)
        for record in self.records:
            own = [_as_float(next(remaining), target, record.path) for target in record.targets]
            for variable, term in record.terms_of(own):
                by_variable.setdefault(id(variable), (variable, []))[1].append(term)
        missing = [path for key, path in self.read.items() if key not in by_variable]
        if missing:
            raise UnsupportedLayerError(
                f"{', '.join(missing)}: the clipping rule of the layer gave no gradient term, so "
                "it would not train. Freeze it with trainable=False, and report the layer."
            )
        return [(variable, _joined(variable, terms)) for variable, terms in by_variable.values()]


def record(
    model: keras.Model,
    x: Any,
    tape: tf.GradientTape,
    batch_capacity: int,
    seeds: Seeds | None = None,
    before_lookup: BeforeLookup | None = None,
    own_loss: LossOfOutputs | None = None,
    shared_uniforms: SharedUniforms | None = None,
) -> Recording:
    """Runs `model(x, training=True)` on `tape`, and its own loss, every layer call recorded.

    Args:
        model: The model, built or not.
        x: Its inputs, each `[batch, ...]`.
        tape: A tape that watches nothing by itself.
        batch_capacity: The largest batch there can be, for what must be refused by its memory.
        seeds: The state of a seed generator at each of its uses, instead of Keras' own, which is
            public: masks must not tell where an example stood in its batch.
        before_lookup: Called with each table and the ids whose rows are about to be read.
        own_loss: From the outputs to the loss, where the model computes it by itself.
        shared_uniforms: Random numbers of layers that draw once for all examples of a step, on
            all replicas and in all parts of a batch; None where there are none.

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
        stack.enter_context(public_rows.recorded_pass(shared_uniforms, model._flatten_layers()))
        for layer, rule in taps:
            tap = Tap(
                layer, tape, records, batch_capacity, guard.seeds_drawn, _settling(before_lookup)
            )
            stack.enter_context(_tapped(layer, rule, tap, guard))
        with guard:
            start = len(_operations())
            outputs = model(x, training=True)
            loss = None if own_loss is None else own_loss(outputs)
        guard.refuse()  # first, since it names variables
        refuse_rounded_ids(model, _operations()[start:])
    return Recording(outputs, records, guard.seeds_drawn(), guard.read, loss)


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
            "(rematerialisation).\nGive its output a loss, return only outputs that have one, "
            "freeze it with trainable=False, or remove keras.RematScope."
        )
    value = tf.cast(tf.convert_to_tensor(cotangent), tf.float32)
    value.set_shape(target.shape)
    return value


def _joined(variable: keras.Variable, terms: list[GradientTerm]) -> GradientTerm:
    if any(isinstance(term, Tied) for term in terms):
        terms = [
            Tied.of_lookups(variable, term) if isinstance(term, Rows) else term for term in terms
        ]
    try:
        return joined(terms)
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


def recorded_tensors(
    terms: Sequence[tuple[keras.Variable, GradientTerm]], losses: tf.Tensor
) -> list[tuple[str, tf.Tensor]]:
    """All that clipping reads, each under the name of its variable."""
    return [("the loss", losses), *((v.path, t) for v, term in terms for t in fields_of(term))]


def require_batch_leads(
    named: Sequence[tuple[str, tf.Tensor]], present: tf.Tensor
) -> list[tf.Operation]:
    """Fails unless all tensors, under their variables' names, lead with the axis of `present`.

    Shapes that are known when the step is traced cost nothing; all others together four operations.

    Raises:
        PrivacyError: Naming the variable; at once, or when the operations returned run.
    """
    known = {t.shape[0] for t in (present, *(t for _, t in named))} - {None}
    batch = present.shape[0] if present.shape[0] is not None else min(known, default=None)
    for name, tensor in named:
        if tensor.shape[0] not in (None, batch):
            raise PrivacyError(_message(name, tensor.shape[0], int(batch or 0)))
    unknown = [each for each in named if each[1].shape[0] is None or present.shape[0] is None]
    if not unknown:
        return []
    leads, expected = _leads([tensor for _, tensor in unknown]), tf.shape(present)[0]
    wrong = tf.argmax(tf.cast(tf.not_equal(leads, expected), tf.int32))
    name = tf.gather(tf.constant([name for name, _ in unknown]), wrong)
    found = tf.gather(leads, wrong)
    message = _message("{}", "{}", "{}")
    return [require(tf.equal(found, expected), PrivacyError, message, expected, name, found)]


def _message(name: str, lead: int | str, batch: int | str) -> str:
    return (
        f"Expected the batch of {batch} examples to be the first axis of what {name} records, got "
        f"{lead} there: {_MEND}."
    )


def _leads(tensors: list[tf.Tensor]) -> tf.Tensor:
    """The first dimension of each, int32 `[tensors]`."""
    by_dtype: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    shapes: list[tf.Tensor] = [None] * len(tensors)
    for indices in by_dtype.values():
        found = tf.shape_n([tensors[index] for index in indices])
        for index, shape in zip(indices, found, strict=True):
            shapes[index] = shape
    starts = [0]
    for tensor in tensors[:-1]:
        starts.append(starts[-1] + tensor.shape.rank)
    return tf.gather(tf.concat(shapes, 0), tf.constant(starts))
