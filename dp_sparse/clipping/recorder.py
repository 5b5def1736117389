"""One forward pass in which every layer call with trainable variables is recorded.

Nothing else is possible. Each such layer is tapped: its `call` is replaced on the instance while
the pass runs. An audit fails closed: a trainable variable read outside its layer's tap, a
non-trainable one written (seed generators apart), and a loss added on the way are refused, since
what was not measured could not be clipped.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.rules import (
    Rule,
    covers_inner_layers,
    fallback_for,
    rule_for,
    tables_of,
)
from dp_sparse.clipping.tap import Record, Tap
from dp_sparse.clipping.uses import Use, joined
from dp_sparse.errors import UnsupportedLayerError

# Preprocessing layers, and the argument that makes their state public.
_ADAPTED = {
    keras.layers.Normalization: "input_mean",
    keras.layers.StringLookup: "input_vocabulary",
    keras.layers.IntegerLookup: "input_vocabulary",
}
Seeds = Callable[[int, str], tf.Tensor]  # from a number within the pass and a dtype, `[2]`
_LORA = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)


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
) -> Recording:
    """Runs `model(x, training=True)` on `tape`, every layer call recorded.

    Args:
        model: The model, built or not.
        x: Its inputs, each `[batch, ...]`.
        tape: A tape that watches nothing by itself.
        batch_capacity: The largest batch there can be, for what must be refused by its memory.
        seeds: The state of a seed generator at each of its uses, instead of Keras' own, which is
            public: masks must not tell where an example stood in its batch.

    Raises:
        UnsupportedLayerError: With every layer whose per-example gradients cannot be had, its path
            and the mend.
    """
    taps = tapped_layers(model)
    audit = _Audit(model.trainable_variables, seeds)
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        for layer, rule in taps:
            tap = Tap(layer, tape, records, batch_capacity, audit.seeds_drawn)
            stack.enter_context(_tapped(layer, rule, tap, audit))
        with audit:
            outputs = model(x, training=True)
    audit.refuse()
    return Recording(outputs, records, audit.seeds_drawn())


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a model's layers are covered by, found without running it.

    Attributes:
        taps: The outermost layers that own trainable variables, each with its rule.
        problems: What cannot be trained privately: paths, reasons and mends.
    """

    taps: list[tuple[keras.layers.Layer, Rule]]
    problems: list[str]


def survey(model: keras.Model) -> Survey:
    """The layers whose calls would be recorded, and all layers that cannot be."""
    found: dict[int, tuple[keras.layers.Layer, Rule]] = {}
    problems: list[str] = []
    _collect(model, found, problems)
    return Survey(list(found.values()), problems)


def tapped_layers(model: keras.Model) -> list[tuple[keras.layers.Layer, Rule]]:
    """The layers whose calls are recorded, each with its rule.

    Raises:
        UnsupportedLayerError: Naming all layers that cannot be trained privately.
    """
    found = survey(model)
    if found.problems:
        raise UnsupportedLayerError(
            "Cannot train privately:\n" + "\n".join(f"- {p}" for p in found.problems)
        )
    return found.taps


def embedding_tables(model: keras.Model) -> list[keras.Variable]:
    """The trainable variables used through lookups alone, in the order of the model's variables."""
    tables = {id(table) for layer, _ in tapped_layers(model) for table in tables_of(layer)}
    return [variable for variable in model.trainable_variables if id(variable) in tables]


def _collect(
    layer: keras.layers.Layer,
    found: dict[int, tuple[keras.layers.Layer, Rule]],
    problems: list[str],
) -> None:
    problem = _problem(layer)
    if problem is not None:
        problems.append(problem)
    rule = rule_for(layer) if layer.trainable_variables else None
    owns = layer.trainable_variables and (
        _owns_variables(layer) or isinstance(layer, keras.layers.RNN)
    )
    if rule is None and owns:
        rule = fallback_for(layer)
    if rule is not None:
        found.setdefault(id(layer), (layer, rule))
        if covers_inner_layers(rule):
            inside = layer._flatten_layers(include_self=False)
            problems += filter(None, map(_problem, inside))
            return
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        _collect(inner, found, problems)


def _owns_variables(layer: keras.layers.Layer) -> bool:
    own = {id(variable) for variable in _own_variables(layer)}
    return any(id(variable) in own for variable in layer.trainable_variables)


def _own_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Those that belong to no layer inside."""
    inside = layer._flatten_layers(include_self=False, recursive=False)
    inner = {id(variable) for layer_inside in inside for variable in layer_inside.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]


def _problem(layer: keras.layers.Layer) -> str | None:
    reason = _reason(layer)
    return None if reason is None else f"{layer.path} ({type(layer).__name__}): {reason}"


def _reason(layer: keras.layers.Layer) -> str | None:
    if (
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ):  # frozen, it runs in inference mode
        return "mixes the examples of a batch. Use keras.layers.GroupNormalization instead."
    if isinstance(layer, keras.layers.Discretization) and layer.num_bins is not None:
        return "its state was adapted to data without privacy. Give it public bin_boundaries=."
    given = next((name for kind, name in _ADAPTED.items() if isinstance(layer, kind)), None)
    if given is not None and getattr(layer, given, None) is None:
        argument = given.removeprefix("input_")
        return f"its state was adapted to data without privacy. Give it a public {argument}=."
    if layer.activity_regularizer is not None:
        return "activity regularizers add a loss over the whole batch. Remove activity_regularizer."
    if not layer.trainable_variables:
        return None
    if rule_for(layer) is not None and isinstance(layer, keras.layers.RNN):
        inside = layer.cell._flatten_layers(include_self=False)
        if any(inner.trainable_variables for inner in inside):
            return "its cell has a layer with weights inside. Use an activation without weights."
    if layer.quantization_mode is not None:
        return (
            "quantised layers have no clipping rule. Train the plain layer, or freeze it with "
            "trainable=False."
        )
    if getattr(layer, "lora_enabled", False) and type(layer) not in _LORA:
        return (
            f"LoRA has a clipping rule for {', '.join(kind.__name__ for kind in _LORA)} alone. "
            "Train the plain layer, or freeze it with trainable=False."
        )
    return None


@contextlib.contextmanager
def _tapped(layer: keras.layers.Layer, rule: Rule, tap: Tap, audit: "_Audit") -> Iterator[None]:
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if audit.covers_all:
            return original(*args, **kwargs)
        with audit.inside(layer, rule):
            return rule(layer, original, tap, *args, **kwargs)

    layer.call = call
    try:
        yield
    finally:
        del layer.call


class _Audit(keras.StatelessScope):
    """Sees every read and write of a variable during a forward pass, and lets no write through."""

    def __init__(self, trainable: list[keras.Variable], seeds: Seeds | None) -> None:
        super().__init__(collect_losses=True)
        self.covers_all = False  # while a rule runs that records the layers inside, too
        self._seeds = seeds
        self._trainable = {id(variable) for variable in trainable}
        self._covered: set[int] = set()
        self._written: list[str] = []
        self._seeds_drawn = 0
        self._outside: list[str] = []

    @contextlib.contextmanager
    def inside(self, layer: keras.layers.Layer, rule: Rule) -> Iterator[None]:
        """While a tapped layer's call runs, the variables that its rule records may be read."""
        before = self._covered, self.covers_all
        covers_all = covers_inner_layers(rule)
        own = layer.variables if covers_all else _own_variables(layer)
        self._covered, self.covers_all = before[0] | {id(v) for v in own}, covers_all
        try:
            yield
        finally:
            self._covered, self.covers_all = before

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Keras asks here for every variable it reads; a seed generator's state is drawn anew."""
        if self._seeds is not None and _is_seed(variable):
            return self._seeds(self._seeds_drawn, variable.dtype)
        if id(variable) in self._trainable and id(variable) not in self._covered:
            self._outside.append(variable.path)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keras reports every assignment here."""
        super().add_update(update)
        if _is_seed(update[0]):
            self._seeds_drawn += 1
        else:
            self._written.append(update[0].path)

    def seeds_drawn(self) -> int:
        """How many random seeds the pass has drawn so far."""
        return self._seeds_drawn

    def refuse(self) -> None:
        """Raises if the pass did what cannot be clipped."""
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
                ["add_loss"] if self.losses else [],
                "a loss over the whole batch; put it into loss= of compile",
            ),
        ]
        lines = [f"- {path}: {mend}." for paths, mend in problems for path in dict.fromkeys(paths)]
        if lines:
            raise UnsupportedLayerError("Cannot train privately:\n" + "\n".join(lines))


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith("seed_generator_state")


def _as_float(cotangent: tf.Tensor | None, target: tf.Tensor, path: str) -> tf.Tensor:
    """Float32, and of the static shape of its target, which gradients of `tf.split` forget."""
    if cotangent is None:
        raise UnsupportedLayerError(
            f"{path}: its output does not reach the loss, or its gradient is hidden "
            f"(rematerialisation). Freeze it with "
            "trainable=False, or remove keras.RematScope."
        )
    value = tf.cast(tf.convert_to_tensor(cotangent), tf.float32)
    value.set_shape(target.shape)
    return value


def _joined(variable: keras.Variable, uses: list[Use]) -> Use:
    try:
        return joined(uses)
    except ValueError as error:
        raise UnsupportedLayerError(
            f"{variable.path}: {error}. Give each use a variable of its own."
        ) from None
