"""EinsumDense, attention layers: exact against brute force for equations of every kind."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.clipping.rules.activation import of_broadcast
from dp_sparse.clipping.rules.dense import Einsum, einsum_of
from tests.clipping.brute_force import assert_as_brute_force, values

SIZES = {"a": 3, "b": 4, "c": 5, "d": 2, "e": 3, "f": 2}

# (equation, output shape, bias axes): as attention, keras-hub and others use them
EQUATIONS = [
    ("ab,bc->ac", (6,), "c"),
    ("abc,cd->abd", (None, 6), "d"),
    ("abc,cde->abde", (None, 2, 3), "de"),
    ("abc,cde->abde", (None, 2, 3), "e"),
    ("abc,cde->abde", (None, 2, 3), "d"),
    ("abcd,cde->abe", (None, 7), "e"),
    ("abcd,dce->abe", (None, 7), None),
    ("abc,bd->acd", (5, 6), "d"),
    ("abc,bcd->ad", (6,), "d"),
    ("abc,bde->acde", (5, 2, 3), "de"),
    ("abc,bcd->abd", (4, 6), "bd"),  # b is a group
    ("abcd,bde->abce", (4, 5, 7), "e"),
    ("abc,cb->ab", (4,), "b"),
    ("abc,bd->ad", (6,), "d"),  # c is summed
    ("...b,bc->...c", (6,), "c"),
    ("ab...,bc->ac...", (6, None), "c"),
]


def shape_for(equation: str) -> tuple[int, ...]:
    inputs = equation.split(",")[0]
    letters = inputs.replace("...b", "aeb").replace("ab...", "abe")
    return tuple(SIZES[letter] for letter in letters)


@pytest.mark.parametrize(("equation", "output", "bias"), EQUATIONS)
def test_equations(equation: str, output: tuple[int | None, ...], bias: str | None) -> None:
    shape = shape_for(equation)
    layer = keras.layers.EinsumDense(equation, output, activation="tanh", bias_axes=bias)
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    form = einsum_of(equation, len(shape))
    assert form is not None and form.is_covered()
    assert_as_brute_force(model, values(*shape))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_equations(data: st.DataObject) -> None:
    """Letters with random roles in a random order, the batch first."""
    roles = data.draw(st.lists(st.sampled_from(["s", "i", "o", "g"]), min_size=1, max_size=4))
    if not {"i", "g"} & set(roles) or not {"o", "g"} & set(roles):
        return
    letters = dict(zip("bcdef", roles, strict=False))
    order = data.draw(st.permutations(sorted(letters)))
    inputs = "a" + "".join(c for c in order if letters[c] in "sig")
    weight = "".join(c for c in data.draw(st.permutations(sorted(letters))) if letters[c] != "s")
    outputs = "a" + "".join(
        c for c in data.draw(st.permutations(sorted(letters))) if letters[c] in "sog"
    )
    layer = keras.layers.EinsumDense(
        f"{inputs},{weight}->{outputs}", tuple(SIZES[c] for c in outputs[1:])
    )
    model = keras.Sequential([keras.Input(tuple(SIZES[c] for c in inputs[1:])), layer])
    assert_as_brute_force(model, values(3, *(SIZES[c] for c in inputs[1:])))


@pytest.mark.parametrize("equation", ["ba,bc->ca", "ab,abc->ac", "ab,ac->abc"])
def test_what_has_no_leading_batch_is_not_covered(equation: str) -> None:
    form = einsum_of(equation, 2)
    assert form is not None and not form.is_covered()


def test_unknown_lengths() -> None:
    layer = keras.layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de")
    model = keras.Sequential([keras.Input((None, 4)), layer])
    assert_as_brute_force(model, values(3, 5, 4))


def test_of_broadcast_sums_the_other_axes() -> None:
    gradient = of_broadcast(tf.ones([2, 3, 4, 5]), (4, 1))
    np.testing.assert_array_equal(gradient, np.full((2, 4, 1), 15.0))


def test_the_gradient_has_the_weights_shape() -> None:
    form = Einsum("abc", "cbd", "abd")
    assert form.gradient(tf.ones([2, 3, 4]), tf.ones([2, 3, 5])).shape == (4, 3, 5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross", "grouped", "causal"])
def test_attention(kind: str, masked: bool) -> None:
    length, width = 4, 6
    if kind == "grouped":
        attention = keras.layers.GroupQueryAttention(3, num_query_heads=4, num_key_value_heads=2)
    else:
        attention = keras.layers.MultiHeadAttention(2, 3, value_dim=4)
    ids = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(9, width, mask_zero=masked)(ids)
    other = keras.layers.Dense(width)(x) if kind == "cross" else x
    arguments = {"use_causal_mask": True} if kind == "causal" else {}
    model = keras.Model(ids, attention(x, other, **arguments))
    assert_as_brute_force(model, np.random.default_rng(0).integers(1, 9, (4, length)))


def test_attention_called_twice() -> None:
    attention = keras.layers.MultiHeadAttention(2, 3)
    x = keras.Input((4, 5))
    once = attention(x, x)
    model = keras.Model(x, attention(once, x))
    assert_as_brute_force(model, values(3, 4, 5))


def test_time_distributed() -> None:
    layer = keras.layers.TimeDistributed(keras.layers.Dense(3, activation="tanh"))
    model = keras.Sequential([keras.Input((4, 5)), layer])
    assert_as_brute_force(model, values(3, 4, 5))
