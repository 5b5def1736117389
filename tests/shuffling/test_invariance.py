"""Permutations change no output and no gradient, with dropout neither."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import noise, shuffling
from dp_sparse.shuffling import Group, Member, Part
from tests.shuffling.permuted_models import MODELS, data_for, mlp, outputs_and_gradients
from tests.training_cases import weights_of

DROPPED = 0.3


class Masks:
    """Dropout whose masks are kept, so that they can be permuted with what they mask.

    Masks of units and of heads are drawn alike and independently, so training with dropout does
    not change if outputs and gradients do not change under masks that follow.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rng = np.random.default_rng(4)
        self._kept: dict[tuple[int, Any], keras.Variable] = {}
        monkeypatch.setattr(
            keras.layers.Dropout,
            "call",
            lambda layer, inputs, training=False: inputs * self._of(layer, inputs),
        )

    def _of(self, layer: keras.layers.Dropout, inputs: Any) -> tf.Tensor:
        shape = tuple(inputs.shape[1:])  # all examples have the same one
        if (id(layer), shape) not in self._kept:
            drawn = (self._rng.random(shape) >= DROPPED) / (1 - DROPPED)
            self._kept[id(layer), shape] = keras.Variable(drawn, trainable=False)
        return self._kept[id(layer), shape].value

    def following(self, model: keras.Model, groups: list[Group]) -> list[Group]:
        """The groups, with the masks of their own units and heads."""
        return [self._with_masks(group, _dropouts(model)) for group in groups]

    def _with_masks(self, group: Group, dropouts: dict[str, keras.layers.Dropout]) -> Group:
        dropout = dropouts.get(group.name.split(":")[0])
        masks = {shape: mask for (owner, shape), mask in self._kept.items() if owner == id(dropout)}
        if group.heads is not None:
            heads = tuple(Member(mask, 0) for mask in masks.values())
            return Group(group.name, (*group.parts, Part(1, heads)), group.heads)
        (part,) = group.parts
        units = tuple(
            Member(mask, len(shape) - 1) for shape, mask in masks.items() if shape[-1] == part.size
        )
        return Group(group.name, (Part(part.size, (*part.members, *units)),))


def _dropouts(model: keras.Model) -> dict[str, keras.layers.Dropout]:
    """By the path of the layer whose units or heads it masks."""
    found = {}
    dense = None
    for layer in model.layers:
        dense = layer if isinstance(layer, keras.layers.Dense) else dense
        if isinstance(layer, keras.layers.Dropout) and dense is not None:
            found[dense.path] = layer
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.MultiHeadAttention):
            found[layer.path] = layer._dropout_layer
        elif type(layer).__name__ == "MLP":
            found[layer.dense_1.path] = layer.dropout
    return found


@pytest.fixture
def float64() -> Iterator[None]:
    """Exact equality is up to rounding, of which deep models of random weights make much."""
    for dtype in ("float64", "float32"):
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        if dtype == "float64":
            yield


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_invariant_to_1e_6(
    name: str, dropout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras.utils.set_random_seed(1)
    make, count = MODELS[name]
    model = make(DROPPED if dropout else 0.0)
    masks = Masks(monkeypatch) if dropout else None
    x, before = data_for(model), weights_of(model)
    outputs, gradients = outputs_and_gradients(model, x)
    kept = {
        id(v): keras.Variable(g) for v, g in zip(model.trainable_variables, gradients, strict=True)
    }
    found = shuffling.permutation_groups(model)
    assert len(found) == count
    groups = found if masks is None else masks.following(model, found)
    shuffle(groups, lambda variable: (kept[id(variable)],) if id(variable) in kept else ())
    after, moved = outputs_and_gradients(model, x)
    np.testing.assert_allclose(after, outputs, rtol=1e-6, atol=1e-9)
    for variable, gradient in zip(model.trainable_variables, moved, strict=True):
        follows = kept[id(variable)].numpy()
        np.testing.assert_allclose(gradient, follows, rtol=1e-6, atol=1e-8)
    members = {id(m.variable) for group in found for part in group.parts for m in part.members}
    for variable, old in zip(model.trainable_variables, before, strict=True):
        if id(variable) in members and np.unique(old).size > 8:
            assert not np.array_equal(variable.numpy(), old), variable.path
        elif id(variable) not in members:
            assert np.array_equal(variable.numpy(), old), variable.path


def shuffle(groups: list[Group], followers: Any = lambda variable: ()) -> None:
    shuffling.shuffle(groups, noise.NoiseKey(not_private_seed=7).next_draw(), followers)


def test_a_member_that_is_left_out_changes_the_output() -> None:
    """So that the test above can fail."""
    model = mlp()
    x, (group, _) = data_for(model), shuffling.permutation_groups(model)
    (part,) = group.parts
    outputs = model(x).numpy()
    shuffle([Group(group.name, (Part(part.size, part.members[:1]),))])
    assert np.abs(model(x).numpy() - outputs).max() > 1e-3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["mlp", "attention", "vit"])
def test_a_mask_that_is_left_out_changes_the_output(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test with dropout can fail."""
    model = MODELS[name][0](DROPPED)
    Masks(monkeypatch)
    x = data_for(model)
    outputs = model(x).numpy()
    shuffle(shuffling.permutation_groups(model))
    assert np.abs(model(x).numpy() - outputs).max() > 1e-3
