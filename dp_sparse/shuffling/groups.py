"""Permutation groups: which weights can be permuted together without any change of the output.

A group is a set of units that may change places, and the axes of variables that must follow
("Shuffled DP-SGD", Theorems 3 and 4): the hidden units of two dense layers with something
elementwise or a normalisation of all units in between; or the heads of an attention layer, and
within each head the units of query and key, and those of value and output. They are found by the
structure of a model.

Permutations are random and made by index gathers, in O(weights of the groups).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import UnsupportedLayerError

_ELEMENTWISE = {"relu", "gelu", "tanh", "sigmoid", "linear", "elu", "selu", "silu", "softplus"}
_ROTARY = {"RotaryEmbedding"}
_FEEDFORWARD = {  # of layers that hold such a pair: its two dense layers
    "TransformerEncoder": ("_feedforward_intermediate_dense", "_feedforward_output_dense"),
    "TransformerDecoder": ("_feedforward_intermediate_dense", "_feedforward_output_dense"),
    "MLP": ("dense_1", "dense_2"),
}
_HEADS = ("_query_dense", "_key_dense", "_value_dense")
FollowersOf = Callable[[keras.Variable], Sequence[keras.Variable]]


@dataclasses.dataclass(frozen=True)
class Member:
    """Axes of a variable that hold the units of a part.

    Attributes:
        variable: The variable.
        axis: The first of them: of the heads if there are any, else of the units.
    """

    variable: keras.Variable
    axis: int


@dataclasses.dataclass(frozen=True)
class Part:
    """Units that change places within each head, by permutations of their own.

    Attributes:
        size: How many a head has.
        members: What follows.
    """

    size: int
    members: tuple[Member, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """What is permuted together.

    Attributes:
        name: The path of the layer, and what is permuted there.
        parts: Each has units of its own.
        heads: How many, which change places in all parts alike; None if there is one set of units,
            without an axis of heads.
    """

    name: str
    parts: tuple[Part, ...]
    heads: int | None = None


def permutation_groups(model: keras.Model) -> list[Group]:
    """The groups of a model, in the order of its layers.

    Dense pairs are found in Sequential and functional models, and inside keras-hub's transformer
    layers; attention groups in every `MultiHeadAttention` of projections without adapters and gate.

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
    outputs = _outputs(layers, model)
    found = [*_dense_pairs(layers, outputs)]
    for layer in layers:
        if isinstance(layer, keras.layers.MultiHeadAttention) and _is_plain(layer):
            found.append(_attention(layer))
    return found


def _outputs(layers: list[Any], model: keras.Model) -> set[int]:
    """The layers whose results leave a model, by id: others see the order of their units."""
    models = [each for each in (model, *layers) if isinstance(each, keras.Model)]
    tensors = tf.nest.flatten([getattr(each, "outputs", None) for each in models])
    return {id(t._keras_history.operation) for t in tensors if isinstance(t, keras.KerasTensor)}


def _dense_pairs(layers: list[Any], outputs: set[int]) -> Iterator[Group]:
    for layer in layers:
        names = _FEEDFORWARD.get(type(layer).__name__)
        if names is not None:
            first, second = (getattr(layer, name) for name in names)
            chain = [first, second]
        elif type(layer) is keras.layers.Dense:
            chain = _chain(layer, outputs)
        else:
            continue
        if chain and _is_elementwise(chain[0]):
            yield _pair(chain)


def _pair(chain: list[Any]) -> Group:
    """The groups of two dense layers and what is between them."""
    first, *between, second = chain
    members = [Member(first.kernel, 1), Member(second.kernel, 0)]
    vectors = [first.bias]
    vectors += [getattr(each, name, None) for each in between for name in ("gamma", "beta")]
    members += [Member(vector, 0) for vector in vectors if vector is not None]
    return Group(f"{first.path}: units", (Part(first.units, tuple(members)),))


def _chain(layer: Any, outputs: set[int]) -> list[Any]:
    """From this layer to the dense one that alone uses its units; empty if there is none."""
    chain = [layer]
    while True:
        nodes = layer._outbound_nodes
        if len(layer._inbound_nodes) != 1 or len(nodes) != 1 or id(layer) in outputs:
            return []
        layer = nodes[0].operation
        if len(layer._inbound_nodes) != 1:
            return []
        chain.append(layer)
        if type(layer) is keras.layers.Dense:
            return chain
        if not _treats_units_alike(layer):
            return []


def _treats_units_alike(layer: Any) -> bool:
    if type(layer) is keras.layers.LayerNormalization:
        return layer.axis in ([-1], [len(layer.input.shape) - 1])
    return isinstance(layer, keras.layers.Dropout) or _is_activation(layer)


def _is_activation(layer: Any) -> bool:
    if isinstance(layer, keras.layers.ReLU | keras.layers.LeakyReLU | keras.layers.ELU):
        return True
    return isinstance(layer, keras.layers.Activation) and _is_elementwise(layer)


def _is_elementwise(layer: Any) -> bool:
    return getattr(layer.activation, "__name__", "gelu_approximate") in {
        *_ELEMENTWISE,
        "gelu_approximate",
    }


def _is_plain(layer: keras.layers.MultiHeadAttention) -> bool:
    """Whether nothing but its three projections sees the order of heads and units."""
    projections = (getattr(layer, name) for name in _HEADS)
    return not layer._use_gate and all(
        type(each) is keras.layers.EinsumDense for each in projections
    )


def _attention(layer: keras.layers.MultiHeadAttention) -> Group:
    """Whole heads; query and key within a head; value and output within a head."""
    query, key, value = (getattr(layer, name) for name in _HEADS)
    members: dict[Any, list[Member]] = {query: [], value: [Member(layer._output_dense.kernel, 0)]}
    for dense, part in ((query, query), (key, query), (value, value)):
        members[part].append(Member(dense.kernel, 1))
        if dense.bias is not None:
            members[part].append(Member(dense.bias, 0))
    parts = [Part(dense.kernel.shape[2], tuple(each)) for dense, each in members.items()]
    return Group(f"{layer.path}: heads and their units", tuple(parts), query.kernel.shape[1])


def shuffle(groups: Sequence[Group], draw: noise.Draw, followers: FollowersOf) -> None:
    """Permutes every group's variables, and what follows each of them (slots of optimizers)."""
    values: dict[int, tf.Tensor] = {}
    variables: dict[int, keras.Variable] = {}
    for number, group in enumerate(groups):
        for part, places in zip(group.parts, permutations(group, draw, number), strict=True):
            for member in part.members:
                for variable in (member.variable, *followers(member.variable)):
                    before = values.get(id(variable), tf.convert_to_tensor(variable.value))
                    values[id(variable)] = permuted(before, member.axis, places)
                    variables[id(variable)] = variable
    for key, value in values.items():
        variables[key].assign(value)


def permutations(group: Group, draw: noise.Draw, number: int) -> list[tf.Tensor]:
    """Which unit of its part comes to each place, int32 `[heads · size]`.

    Heads, and the units of each head and part, have uniform and independent permutations, of 53
    random bits each.
    """
    heads, sizes = group.heads or 1, [part.size for part in group.parts]
    count = tf.constant(heads * (1 + sum(sizes)))
    keys = noise.uniform(draw, noise.Purpose.DENSE + number, count)
    of_heads, *of_units = tf.split(keys, [heads, *(heads * size for size in sizes)])
    order = tf.argsort(of_heads)[:, tf.newaxis]
    found = []
    for size, units in zip(sizes, of_units, strict=True):
        within = tf.argsort(tf.reshape(units, [heads, size]), axis=1)
        found.append(tf.reshape(size * order + within, [-1]))
    return found


def permuted(values: tf.Tensor, axis: int, places: tf.Tensor) -> tf.Tensor:
    """`values` with unit `places[i]` at place i.

    Args:
        values: Of any static shape.
        axis: From which on as many axes hold the units, flattened, as there are places.
        places: int32 `[units]`.
    """
    outer = values.shape[:axis].num_elements()
    flat = tf.reshape(values, [outer, places.shape[0], -1])
    gathered = tf.gather(flat, places, axis=1) if outer == 1 else _inner(flat, places)
    return tf.reshape(gathered, values.shape)


@tf.function(jit_compile=True, autograph=False)
def _inner(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Along the second of three axes; TensorFlow's own gather is several times slower there."""
    return tf.gather(values, places, axis=1)
