"""Layers that compute in half precision: records are float32, and near brute force."""

from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest

import dp_sparse
from tests.clipping.brute_force import assert_as_brute_force
from tests.training_cases import marked_dataset, plan_for, weights_of

LAYERS = keras.layers


def attention() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    values = LAYERS.Embedding(9, 6)(tokens)
    values = LAYERS.MultiHeadAttention(2, 3)(values, values)
    values = LAYERS.LayerNormalization()(values)
    return keras.Model(tokens, LAYERS.GlobalAveragePooling1D()(values))


def images() -> keras.Model:
    inputs = keras.Input((6, 6, 2))
    values = LAYERS.Conv2D(4, 3, activation="relu")(inputs)
    values = LAYERS.GroupNormalization(2)(values)
    values = LAYERS.DepthwiseConv2D(2)(values)
    return keras.Model(inputs, LAYERS.Dense(3)(LAYERS.Flatten()(values)))


def sequence(kind: type[keras.layers.Layer]) -> keras.Model:
    return keras.Sequential([keras.Input((5, 4)), kind(6), LAYERS.Dense(2)])


MODELS: dict[str, Callable[[], keras.Model]] = {
    "attention": attention,
    "images": images,
    "lstm": lambda: sequence(LAYERS.LSTM),
    "gru": lambda: sequence(LAYERS.GRU),
    "rnn": lambda: sequence(LAYERS.SimpleRNN),
}


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(previous)


def inputs_of(model: keras.Model, batch: int) -> np.ndarray:
    shape = (batch, *model.input_shape[1:])
    rng = np.random.default_rng(0)
    words = model.inputs[0].dtype == "int32"
    return rng.integers(0, 9, shape) if words else rng.normal(size=shape).astype(np.float32)


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_near_brute_force(name: str, policy: str) -> None:
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    assert model.compute_dtype == policy.removeprefix("mixed_")
    tolerance = 0.005 if policy == "mixed_float16" else 0.04  # 10 and 7 bits of fraction
    assert_as_brute_force(model, inputs_of(model, 4), tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_train(name: str, policy: str) -> None:
    model, plan = MODELS[name](), plan_for(6)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.Adagrad(0.1), plan, 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    before, x = weights_of(model), inputs_of(model, 6)
    y = np.ones((6, model.output_shape[-1]), np.float32)
    history = model.fit(marked_dataset(plan, x, y, steps=2), verbose=0)
    assert np.isfinite(history.history["loss"][0])
    assert int(optimizer.diagnostics.not_finite) == 0
    for variable, old in zip(model.trainable_variables, before, strict=True):
        assert variable.dtype == "float32"
        assert np.any(np.array(variable) != old), variable.path


@pytest.mark.cases(1)
def test_an_overflow_zeroes_the_example_and_is_counted(policy: str) -> None:
    """float16 ends at 65,504: what overflows there is no gradient, and must not become one."""
    model = keras.Sequential([keras.Input((2,)), LAYERS.Dense(1, kernel_initializer="ones")])
    plan = plan_for(3)
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    x = np.array([[60_000.0, 60_000.0], [1.0, 1.0], [2.0, 1.0]], np.float32)
    model.fit(marked_dataset(plan, x, np.zeros((3, 1), np.float32)), verbose=0)
    assert int(optimizer.diagnostics.not_finite) == (policy == "mixed_float16")
    assert all(np.all(np.isfinite(weights)) for weights in weights_of(model))
