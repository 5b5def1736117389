"""Dense: exact against brute force for inputs of every rank."""

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clipping.brute_force import assert_as_brute_force, values


@settings(max_examples=25, deadline=None)
@given(
    inner=st.lists(st.integers(1, 4), min_size=0, max_size=2),
    width=st.integers(1, 5),
    units=st.integers(1, 5),
    bias=st.booleans(),
    activation=st.sampled_from([None, "relu", "tanh", "softmax", "gelu"]),
    seed=st.integers(0, 1000),
    weighted=st.booleans(),
)
def test_random_dense_layers(
    inner: list[int], width: int, units: int, bias: bool, activation: str, seed: int, weighted: bool
) -> None:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((*inner, width)),
            keras.layers.Dense(units, activation=activation, use_bias=bias),
            keras.layers.Dense(3, use_bias=not bias),
        ]
    )
    x = values(4, *inner, width, seed=seed)
    assert_as_brute_force(model, x, seed=seed, weighted=weighted)


def test_long_sequences_and_wide_outputs_take_the_other_formula() -> None:
    """Positions · (in + out) on both sides of in · out."""
    for positions, width, units in ((2, 40, 40), (30, 4, 5)):
        model = keras.Sequential([keras.Input((positions, width)), keras.layers.Dense(units)])
        assert_as_brute_force(model, values(3, positions, width))


def test_more_columns_than_one_chunk() -> None:
    model = keras.Sequential([keras.Input((40, 300)), keras.layers.Dense(500)])
    assert_as_brute_force(model, values(2, 40, 300), tolerance=2e-5)


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Dense(4, activation=keras.layers.PReLU(alpha_initializer="ones")),
        keras.layers.EinsumDense("abc,cd->abd", (6, 4), activation=keras.layers.PReLU()),
        keras.layers.Conv1D(4, 2, activation=keras.layers.PReLU()),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_an_activation_with_weights_has_its_own_rule(layer: keras.layers.Layer) -> None:
    model = keras.Sequential([keras.Input((6, 5)), layer])
    model(values(3, 6, 5))  # builds what Keras leaves for the first call
    assert len(model.trainable_variables) >= 2
    assert_as_brute_force(model, values(3, 6, 5))


def test_shared_layer_called_twice_adds_before_squaring() -> None:
    one, two = keras.Input((3,)), keras.Input((3,))
    shared = keras.layers.Dense(4, activation="tanh")
    model = keras.Model(
        [one, two], keras.layers.Dense(1)(keras.layers.Add()([shared(one), shared(two)]))
    )
    assert_as_brute_force(model, [values(5, 3), values(5, 3, seed=1)])


def test_shared_layer_on_inputs_of_different_rank() -> None:
    one, two = keras.Input((3,)), keras.Input((4, 3))
    shared = keras.layers.Dense(2)
    pooled = keras.layers.GlobalAveragePooling1D()(shared(two))
    model = keras.Model([one, two], keras.layers.Add()([shared(one), pooled]))
    assert_as_brute_force(model, [values(5, 3), values(5, 4, 3, seed=1)])


@pytest.mark.parametrize("frozen", ["kernel", "layer"])
def test_what_is_frozen_has_no_gradient(frozen: str) -> None:
    layer = keras.layers.Dense(4)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    (layer if frozen == "layer" else layer.kernel).trainable = False
    assert len(model.trainable_variables) == (2 if frozen == "layer" else 3)
    assert_as_brute_force(model, values(4, 3))


def test_the_layer_is_left_as_it_was() -> None:
    layer = keras.layers.Dense(4, activation="relu")
    model = keras.Sequential([keras.Input((3,)), layer])
    assert_as_brute_force(model, values(4, 3))
    assert layer.activation is keras.activations.relu
    assert "call" not in vars(layer)


def test_padding_of_the_batch_adds_nothing() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert_as_brute_force(model, values(6, 3), padding=4)
    assert_as_brute_force(model, values(2, 3), padding=2)


def test_batch_of_one() -> None:
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(2)])
    assert_as_brute_force(model, values(1, 5, 3))
