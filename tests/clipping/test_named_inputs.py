"""Functional models take their inputs by name, whatever their inputs look like."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse.clipping import named_inputs, take_by_name, take_by_place
from dp_sparse.clipping.named_inputs import taken_by_name

X = {"user": np.array([5.0, 6.0]), "age": np.array([7.0, 8.0]), "item": np.array([1.0, 2.0])}
OWN = np.array([105.0, 206.0])  # 100 · item + user


def inputs() -> dict[str, Any]:
    return {name: keras.Input((), name=name) for name in ("user", "item")}


def by_place(given: dict[str, Any]) -> keras.Model:
    return keras.Model([given["item"], given["user"]], 100 * given["item"] + given["user"])


def by_name(given: dict[str, Any]) -> keras.Model:
    return keras.Model(given, 100 * given["item"] + given["user"])


def nested(given: dict[str, Any]) -> keras.Model:
    return keras.Model({"x": given, "z": keras.Input((), name="z")}, by_name(inputs())(given))


@pytest.mark.parametrize("make", [by_place, by_name])
@pytest.mark.filterwarnings("error:The structure")
@pytest.mark.filterwarnings("ignore:.*left out")
def test_one_column_more_changes_nothing(make: Any) -> None:
    model = make(inputs())
    assert [*named_inputs(model, X)] in (["user", "item"], ["item", "user"])
    with taken_by_name(model):
        np.testing.assert_array_equal(model(X), OWN)
        np.testing.assert_array_equal(tf.function(model)(X), OWN)
    assert "_standardize_inputs" not in vars(model) and "compute_output_spec" not in vars(model)


@pytest.mark.filterwarnings("error:The structure")
def test_dicts_inside_of_dicts_are_taken_by_name() -> None:
    model = nested(inputs())
    given = {"x": X, "y": X["age"], "z": X["age"]}
    with pytest.warns(UserWarning, match=r"no input for x\['y'\], x\['x'\]\['age'\]: left out"):
        taken = named_inputs(model, given)
    assert taken.keys() == {"x", "z"} and taken["x"].keys() == {"user", "item"}
    with taken_by_name(model):
        np.testing.assert_array_equal(model(given), OWN)
    with pytest.raises(ValueError, match=r"Expected x\['x'\] with the inputs .*without \['item'\]"):
        named_inputs(model, {"x": {"user": X["user"]}, "z": X["age"]})


def test_what_is_no_dict_is_left_to_keras() -> None:
    model = by_place(inputs())
    given = [X["item"], X["user"]]
    np.testing.assert_array_equal(named_inputs(model, given), given)


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_single_input_and_a_sequential_take_the_column_of_their_name() -> None:
    given = keras.Input((), name="item")
    for model in (
        keras.Model(given, given + 1),
        keras.Sequential([given, keras.layers.Identity()]),
    ):
        assert [*named_inputs(model, X)] == ["item"]
        take_by_name(model)
        take_by_place(model)


def test_a_model_with_a_call_of_its_own_gets_the_dict_as_it_is() -> None:
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x["age"]

    class OwnFunctional(keras.Model):
        def __init__(self) -> None:
            given = inputs()
            super().__init__(given, given["user"])

        def call(self, x: Any) -> Any:
            return x["age"]

    for model in (Own(), OwnFunctional()):
        assert named_inputs(model, X) is X


def test_a_column_is_told_once() -> None:
    model = by_name(inputs())
    with pytest.warns(UserWarning, match="left out"):
        named_inputs(model, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named_inputs(model, X)


def test_a_graph_of_symbols_pairs_by_name() -> None:
    """A model around a model is built of symbols, which take another way."""
    own = {"user": keras.Input((2,), name="user"), "item": keras.Input((3,), name="item")}
    model = keras.Model(own, own["item"])
    others = {name: keras.Input((size,)) for name, size in (("age", 9), ("item", 3), ("user", 2))}
    take_by_name(model)
    assert model(others).shape == (None, 3)
