"""LayerNormalization over several axes, with and without scale and centre."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clipping.brute_force import assert_as_brute_force, values


@settings(max_examples=20, deadline=None)
@given(
    axes=st.sampled_from([-1, 1, 2, 3, [1, 2], [2, 3], [1, 3], [-1, -2], [1, 2, 3]]),
    center=st.booleans(),
    scale=st.booleans(),
    rms=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_axes(
    axes: int | list[int], center: bool, scale: bool, rms: bool, seed: int
) -> None:
    keras.utils.set_random_seed(seed)
    layer = keras.layers.LayerNormalization(
        axis=axes,
        center=center,
        scale=scale,
        rms_scaling=rms,
        epsilon=0.01,
        gamma_initializer="random_normal",
        beta_initializer="random_normal",
    )
    model = keras.Sequential([keras.Input((2, 3, 4)), layer, keras.layers.Dense(2)])
    x = np.random.default_rng(seed).normal(size=(4, 2, 3, 4)).astype(np.float32)
    assert_as_brute_force(model, x, seed=seed, padding=1)


@pytest.mark.parametrize("frozen", ["gamma", "beta"])
def test_one_of_two_frozen(frozen: str) -> None:
    layer = keras.layers.LayerNormalization()
    model = keras.Sequential([keras.Input((5, 3)), layer])
    getattr(layer, frozen).trainable = False
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    assert len(model.trainable_variables) == 1
    assert_as_brute_force(model, x)


def test_between_layers_and_called_twice() -> None:
    inputs = keras.Input((5, 3))
    norm, dense = keras.layers.LayerNormalization(), keras.layers.Dense(3, "gelu")
    model = keras.Model(inputs, norm(dense(norm(inputs))))
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    assert_as_brute_force(model, x, weighted=True)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("inner", [(), (4,), (3, 2)])
@pytest.mark.parametrize(("scale", "center"), [(True, True), (True, False), (False, True)])
def test_group_normalization(
    inner: tuple[int, ...], groups: int, scale: bool, center: bool
) -> None:
    layer = keras.layers.GroupNormalization(groups, scale=scale, center=center)
    model = keras.Sequential([keras.Input((*inner, 6)), layer, keras.layers.Dense(2)])
    randomise(layer)
    assert_as_brute_force(model, values(4, *inner, 6))


def test_group_normalization_of_another_axis() -> None:
    layer = keras.layers.GroupNormalization(2, axis=1)
    model = keras.Sequential([keras.Input((4, 3, 2)), layer, keras.layers.Dense(2)])
    randomise(layer)
    assert_as_brute_force(model, values(4, 4, 3, 2))


@pytest.mark.parametrize("axis", [-1, [1, 2]])
def test_rms_normalization(axis: int | list[int]) -> None:
    layer = keras.layers.RMSNormalization(axis=axis)
    model = keras.Sequential([keras.Input((4, 6)), layer, keras.layers.Dense(2)])
    randomise(layer)
    assert_as_brute_force(model, values(4, 4, 6))


def test_unit_normalization_has_nothing_to_train() -> None:
    layers = [keras.layers.Dense(3), keras.layers.UnitNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    assert_as_brute_force(model, values(4, 4))


@pytest.mark.parametrize("shared", [None, [1], [1, 2]])
def test_prelu(shared: list[int] | None) -> None:
    layer = keras.layers.PReLU(alpha_initializer="uniform", shared_axes=shared)
    model = keras.Sequential([keras.Input((3, 2, 4)), layer, keras.layers.Dense(2)])
    assert_as_brute_force(model, values(4, 3, 2, 4))


def randomise(layer: keras.layers.Layer) -> None:
    """Scales and offsets as after some training."""
    for seed, variable in enumerate(layer.trainable_variables):
        variable.assign(values(*variable.shape, seed=seed))
