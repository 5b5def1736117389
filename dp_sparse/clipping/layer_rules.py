"""Which layers of a model are recorded, by which rules, and which cannot be trained privately.

A layer is a tied output layer if the model calls it with `reverse=True`.

Models such as keras-hub's BERT hold their words in a layer that could multiply with its table but
only look rows up in it. A pass over the model tells, which is traced and computes nothing.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.rules import (
    Rule,
    covers_inner_layers,
    fallback_for,
    may_read_table_whole,
    rule_for,
    tables_of,
)
from dp_sparse.core import UnsupportedLayerError, replaced_call

# Preprocessing layers, and the argument that gives them a public state.
_ADAPTED = {
    keras.layers.Normalization: "input_mean",
    keras.layers.StringLookup: "input_vocabulary",
    keras.layers.IntegerLookup: "input_vocabulary",
}
_LORA = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)


def layers_called_with_reverse(
    model: keras.Model, layers: list[keras.layers.Layer]
) -> list[keras.layers.Layer]:
    """Those of `layers` whose tables the model reads whole; all of them if nothing tells.

    Args:
        model: Built, or with known inputs.
        layers: Layers inside it, each with `call(inputs, reverse=False)`.
    """
    signature = _signature(model) if layers else None
    if signature is None:
        return layers
    called: set[int] = set()
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_watched(layer, lambda own=layer: called.add(id(own))))  # type: ignore[misc]
        try:
            traced = tf.function(lambda x: model(x, training=True), autograph=False)
            traced.get_concrete_function(signature)
        except Exception:  # such as ids that are strings; what is not known is read whole
            return layers
    return [layer for layer in layers if id(layer) in called]


def _signature(model: keras.Model) -> Any:
    """What the model takes, of any number of examples, or None if nothing tells."""
    functional = getattr(model, "_functional", None) or model  # what a Sequential is inside
    inputs = getattr(functional, "_inputs_struct", None)
    if inputs is not None:
        return tf.nest.map_structure(
            lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), inputs
        )
    shapes = getattr(model, "_build_shapes_dict", None) or {}
    if len(shapes) != 1:
        return None
    (shape,) = shapes.values()
    of_ids = functools.partial(tf.TensorSpec, dtype=tf.int32)
    return keras.tree.map_shape_structure(of_ids, shape)


def _watched(
    layer: keras.layers.Layer, on_reverse: Callable[[], Any]
) -> contextlib.AbstractContextManager[None]:
    original = layer.call

    @functools.wraps(original)
    def call(inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            on_reverse()
        return original(inputs, reverse=reverse)

    return replaced_call(layer, call)


@dataclasses.dataclass(frozen=True)
class LayerRules:
    """The rules of a model's layers, found without running it.

    Attributes:
        taps: The outermost layers that own trainable variables, each with its rule.
        problems: Layers that cannot be trained privately: path, reason and fix of each.
    """

    taps: list[tuple[keras.layers.Layer, Rule]]
    problems: list[str]


def find_rules(model: keras.Model) -> LayerRules:
    """The layers whose calls would be recorded, and all layers that cannot be trained."""
    found: dict[int, tuple[keras.layers.Layer, Rule]] = {}
    problems: list[str] = []
    _collect(model, found, problems)
    return LayerRules(list(found.values()), problems)


def tapped_layers(model: keras.Model) -> list[tuple[keras.layers.Layer, Rule]]:
    """The layers whose calls are recorded, each with its rule.

    Raises:
        UnsupportedLayerError: With all layers that cannot be trained privately.
    """
    found = find_rules(model)
    if found.problems:
        raise UnsupportedLayerError(
            "Cannot train privately:\n" + "\n".join(f"- {p}" for p in found.problems)
        )
    return found.taps


def embedding_tables(model: keras.Model) -> list[keras.Variable]:
    """The trainable variables used through lookups alone, in the order of the model's variables."""
    layers = [layer for layer, _ in tapped_layers(model)]
    whole = set(map(id, _read_whole(model, layers)))
    tables = {id(table) for layer in layers if id(layer) not in whole for table in tables_of(layer)}
    return [variable for variable in model.trainable_variables if id(variable) in tables]


def tables_read_whole(model: keras.Model) -> list[str]:
    """Paths of the layers that also multiply with their table, as tied output layers do."""
    layers = [layer for layer, _ in tapped_layers(model)]
    return [layer.path for layer in _read_whole(model, layers)]


def _read_whole(model: keras.Model, layers: list[keras.layers.Layer]) -> list[keras.layers.Layer]:
    inner = model._flatten_layers()
    always = {id(own) for layer in inner for own in getattr(layer, "reads_whole", ())}
    whole = [layer for layer in layers if id(layer) in always]
    asked = [layer for layer in layers if may_read_table_whole(layer) and id(layer) not in always]
    return [*whole, *layers_called_with_reverse(model, asked)]


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
    own = {id(variable) for variable in own_variables(layer)}
    return any(id(variable) in own for variable in layer.trainable_variables)


def own_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer that belong to no layer inside it."""
    inside = layer._flatten_layers(include_self=False, recursive=False)
    inner = {id(variable) for layer_inside in inside for variable in layer_inside.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]


def _problem(layer: keras.layers.Layer) -> str | None:
    reason = _reason(layer)
    name = layer.path or layer.name  # a layer that was not built has no path
    return None if reason is None else f"{name} ({type(layer).__name__}): {reason}"


def _set_afterwards(argument: str) -> str:
    return (
        "its state was set after it was made: by adapt, which reads data without privacy, or "
        f"by hand. If it is public, give it to the layer as {argument}= when it is made."
    )


def _reason(layer: keras.layers.Layer) -> str | None:
    if (
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ):  # frozen, it runs in inference mode
        return "mixes the examples of a batch. Use keras.layers.GroupNormalization instead."
    if isinstance(layer, keras.layers.Discretization) and layer.num_bins is not None:
        return _set_afterwards("bin_boundaries")
    given = next((name for kind, name in _ADAPTED.items() if isinstance(layer, kind)), None)
    if given is not None and getattr(layer, given, None) is None:
        return _set_afterwards(given.removeprefix("input_"))
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
            "trainable=False; to load a model that was quantised after training, pass "
            "compile=False to load_model."
        )
    if getattr(layer, "lora_enabled", False) and type(layer) not in _LORA:
        return (
            f"LoRA has a clipping rule for {', '.join(kind.__name__ for kind in _LORA)} alone. "
            "Train the plain layer, or freeze it with trainable=False."
        )
    return None
