"""Which layers of a model are recorded, by which rules, and which cannot be trained privately."""

import dataclasses

import keras

from dp_sparse.clipping.rules import (
    Rule,
    covers_inner_layers,
    fallback_for,
    may_read_table_whole,
    rule_for,
    tables_of,
)
from dp_sparse.clipping.tied_layers import layers_called_with_reverse
from dp_sparse.core import UnsupportedLayerError

# Preprocessing layers, and the argument that gives them a public state.
_ADAPTED = {
    keras.layers.Normalization: "input_mean",
    keras.layers.StringLookup: "input_vocabulary",
    keras.layers.IntegerLookup: "input_vocabulary",
}
_LORA = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)


@dataclasses.dataclass(frozen=True)
class Survey:
    """The rules of a model's layers, found without running it.

    Attributes:
        taps: The outermost layers that own trainable variables, each with its rule.
        problems: Layers that cannot be trained privately: path, reason and fix of each.
    """

    taps: list[tuple[keras.layers.Layer, Rule]]
    problems: list[str]


def survey(model: keras.Model) -> Survey:
    """The layers whose calls would be recorded, and all layers that cannot be trained."""
    found: dict[int, tuple[keras.layers.Layer, Rule]] = {}
    problems: list[str] = []
    _collect(model, found, problems)
    return Survey(list(found.values()), problems)


def tapped_layers(model: keras.Model) -> list[tuple[keras.layers.Layer, Rule]]:
    """The layers whose calls are recorded, each with its rule.

    Raises:
        UnsupportedLayerError: With all layers that cannot be trained privately.
    """
    found = survey(model)
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
    return layers_called_with_reverse(model, list(filter(may_read_table_whole, layers)))


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
