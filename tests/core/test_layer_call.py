"""A layer's own call is back afterwards, whatever it was."""

import keras
import numpy as np
import pytest

from dp_sparse.core import replaced_call


def test_the_call_is_another_one_for_a_while() -> None:
    layer = keras.layers.Identity()
    with replaced_call(layer, lambda x: 2 * x):
        assert layer(np.ones(1))[0] == 2
    assert layer(np.ones(1))[0] == 1 and "call" not in vars(layer)


def test_an_instance_keeps_a_call_of_its_own() -> None:
    layer = keras.layers.Identity()
    layer.call = lambda x: 3 * x
    with replaced_call(layer, lambda x: 2 * x):
        pass
    assert layer(np.ones(1))[0] == 3


def test_an_error_ends_it_too() -> None:
    layer = keras.layers.Identity()
    with pytest.raises(KeyError), replaced_call(layer, lambda x: {}[x]):
        layer.call("missing")
    assert "call" not in vars(layer)
