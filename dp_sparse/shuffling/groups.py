"""Permutation groups: which weights can be permuted together without any change of the output.

A group is a set of places that may change among themselves, and the axes of variables that must
follow: the hidden units of two dense layers with something elementwise in between, the heads of an
attention layer, and within each head the units of query and key, and those of value and output
("Shuffled DP-SGD", Theorems 3 and 4). They are found by the structure of a model.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from dp_sparse.core import UnsupportedLayerError

_ELEMENTWISE = {"relu", "gelu", "tanh", "sigmoid", "linear", "elu", "selu", "silu", "softplus"}
_ROTARY = {"RotaryEmbedding"}
_FEEDFORWARD = {  # of layers that hold such a pair: its two dense layers
    "TransformerEncoder": ("_feedforward_intermediate_dense", "_feedforward_output_dense"),
    "TransformerDecoder": ("_feedforward_intermediate_dense", "_feedforward_output_dense"),
    "MLP": ("dense_1", "dense_2"),
}
_HEADS = ("_query_dense", "_key_dense", "_value_dense")


@dataclasses.dataclass(frozen=True)
class Member:
    """An axis of a variable.

    Attributes:
        variable: The variable.
        axis: Along which its entries are permuted.
        head_axis: Along which each entry has a permutation of its own; None for one in all.
    """

    variable: keras.Variable
    axis: int
    head_axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Places that are permuted together.

    Attributes:
        name: The path of the layer, and what is permuted there.
        size: How many places.
        permutations: How many independent permutations: of heads one each, else 1.
        members: What follows.
    """

    name: str
    size: int
    permutations: int
    members: tuple[Member, ...]


def permutation_groups(model: keras.Model) -> list[Group]:
    """The groups of a model, in the order of its layers.

    Dense pairs are found in Sequential and functional models, and inside keras-hub's transformer
    layers; attention groups in every `MultiHeadAttention`.

    Raises:
        UnsupportedLayerError: A rotary embedding, which ties the units of a head to positions.
    """
    layers = list(model._flatten_layers(include_self=False))
    for layer in layers:
        if type(layer).__name__ in _ROTARY:
            raise UnsupportedLayerError(
                f"Expected a model without rotary embeddings, got {layer.path or layer.name} "
                f"({type(layer).__name__}): units of a head cannot change places. Train it with "
                "DPSGDOptimizer."
            )
    found = [*_dense_pairs(layers)]
    for layer in layers:
        if isinstance(layer, keras.layers.MultiHeadAttention):
            found += _attention(layer)
    return found


def _dense_pairs(layers: list[Any]) -> Iterator[Group]:
    for layer in layers:
        names = _FEEDFORWARD.get(type(layer).__name__)
        if names is not None:
            first, second = (getattr(layer, name) for name in names)
        elif type(layer) is keras.layers.Dense:
            first, second = layer, _next_dense(layer)
        else:
            continue
        if second is not None and _is_elementwise(first):
            members = [Member(first.kernel, 1), Member(second.kernel, 0)]
            if first.bias is not None:
                members.append(Member(first.bias, 0))
            yield Group(f"{first.path}: units", first.units, 1, tuple(members))


def _next_dense(layer: Any) -> Any:
    """The dense layer that alone uses what this one gives, behind elementwise layers; or None."""
    while True:
        nodes = layer._outbound_nodes
        if len(layer._inbound_nodes) != 1 or len(nodes) != 1:
            return None
        layer = nodes[0].operation
        if len(layer._inbound_nodes) != 1:
            return None
        if type(layer) is keras.layers.Dense:
            return layer
        if not isinstance(layer, keras.layers.Dropout) and not _is_activation(layer):
            return None


def _is_activation(layer: Any) -> bool:
    if isinstance(layer, keras.layers.ReLU | keras.layers.LeakyReLU | keras.layers.ELU):
        return True
    return isinstance(layer, keras.layers.Activation) and _is_elementwise(layer)


def _is_elementwise(layer: Any) -> bool:
    return getattr(layer.activation, "__name__", "gelu_approximate") in {
        *_ELEMENTWISE,
        "gelu_approximate",
    }


def _attention(layer: keras.layers.MultiHeadAttention) -> list[Group]:
    """Whole heads; query and key within a head; value and output within a head."""
    query, key, value = (getattr(layer, name) for name in _HEADS)
    output = layer._output_dense
    heads = [Member(output.kernel, 0)]
    inner: dict[str, list[Member]] = {"query and key": [], "value and output": []}
    for dense, name in (
        (query, "query and key"),
        (key, "query and key"),
        (value, "value and output"),
    ):
        heads.append(Member(dense.kernel, 1))
        inner[name].append(Member(dense.kernel, 2, head_axis=1))
        if dense.bias is not None:
            heads.append(Member(dense.bias, 0))
            inner[name].append(Member(dense.bias, 1, head_axis=0))
    inner["value and output"].append(Member(output.kernel, 1, head_axis=0))
    count = query.kernel.shape[1]
    groups = [Group(f"{layer.path}: heads", count, 1, tuple(heads))]
    sizes = query.kernel.shape[2], value.kernel.shape[2]
    for size, (name, members) in zip(sizes, inner.items(), strict=True):
        groups.append(Group(f"{layer.path}: {name}", size, count, tuple(members)))
    return groups
