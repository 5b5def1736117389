"""Any other layer: exact by a per-example product, or a refusal that names it and the mend."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import DPSGDOptimizer, UnsupportedLayerError
from dp_sparse.clipping.rules import fallback
from tests.clipping_cases import assert_as_brute_force, clipped
from tests.training_cases import plan_for


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Affine(keras.layers.Layer):
    """Two variables of its own, used in a way no rule knows."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="scale")
        self.shift = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="shift")

    def call(self, inputs: Any) -> Any:
        return keras.ops.sin(inputs * self.scale) + self.shift**2


class Gated(keras.layers.Layer):
    """Owns a variable and layers; takes two inputs and gives two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.gate = self.add_weight(shape=(3,), initializer="random_normal", name="gate")

    def call(self, inputs: Any, other: Any) -> Any:
        hidden = self.dense(inputs)
        return hidden * self.gate, keras.ops.tanh(hidden + other)


def sequential(layer: keras.layers.Layer, *shape: int) -> keras.Model:
    return keras.Sequential(
        [keras.Input(shape), layer, keras.layers.Flatten(), keras.layers.Dense(2)]
    )


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Affine, (3,)),
        (Affine, (4, 3)),
        (
            lambda: keras.layers.EinsumDense("abc,cd->abd", output_shape=(4, 5), bias_axes="d"),
            (4, 3),
        ),
        (lambda: keras.layers.Conv2D(2, 2, activation="relu"), (4, 4, 3)),
        (lambda: keras.layers.Conv1D(2, 2, strides=2, padding="same"), (5, 3)),
        (lambda: keras.layers.PReLU(alpha_initializer="random_normal"), (4,)),
        (lambda: keras.layers.GroupNormalization(groups=2), (3, 4)),
        (lambda: keras.layers.UnitNormalization(), (4,)),
        (lambda: keras.layers.MultiHeadAttention(2, 3), None),
    ],
    ids=[
        "affine",
        "affine on sequences",
        "einsum dense",
        "conv2d",
        "conv1d",
        "prelu",
        "group norm",
        "nothing to train",
        "attention",
    ],
)
def test_layers_without_a_rule(make: Any, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        inputs = keras.Input((4, 3))
        model = keras.Model(inputs, make()(inputs, inputs))
        shape = (4, 3)
    else:
        model = sequential(make(), *shape)
    assert_as_brute_force(model, values(3, *shape), padding=1, tolerance=2e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.LSTM(3),
        lambda: keras.layers.GRU(3, return_sequences=True),
        lambda: keras.layers.SimpleRNN(3),
    ],
    ids=["LSTM", "GRU", "SimpleRNN"],
)
def test_recurrent_layers_without_dropout(make: Any) -> None:
    assert_as_brute_force(sequential(make(), 4, 3), values(3, 4, 3), tolerance=2e-5)


def test_two_inputs_two_outputs_and_inner_layers() -> None:
    one, two = keras.Input((4,)), keras.Input((3,))
    model = keras.Model([one, two], list(Gated()(one, two)))
    assert_as_brute_force(model, [values(5, 4), values(5, 3, seed=1)])


def test_a_subclass_of_dense_may_do_anything() -> None:
    class Squared(keras.layers.Dense):
        def call(self, inputs: Any, training: Any = None) -> Any:
            return keras.ops.square(super().call(inputs))

    assert_as_brute_force(sequential(Squared(4), 3), values(4, 3))


def test_called_twice() -> None:
    inputs = keras.Input((3,))
    layer = Affine()
    assert_as_brute_force(keras.Model(inputs, layer(layer(inputs))), values(4, 3))


def test_arguments_that_are_no_tensors_pass_through() -> None:
    class Power(Affine):
        def call(self, inputs: Any, exponent: int = 1, names: Any = None) -> Any:
            assert names == ["a"]
            return super().call(inputs) ** exponent

    inputs = keras.Input((3,))
    assert_as_brute_force(
        keras.Model(inputs, Power()(inputs, exponent=2, names=["a"])), values(4, 3)
    )


def test_a_frozen_variable_of_the_layer() -> None:
    layer = Affine()
    model = sequential(layer, 3)
    layer.shift.trainable = False
    assert len(model.trainable_variables) == 3
    assert_as_brute_force(model, values(4, 3))


class Noisy(Affine):
    """Dropout inside, so that a second call would draw another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, inputs: Any) -> Any:
        return self.dropout(super().call(inputs))


def refusal(model: keras.Model, *shape: int) -> str:
    with pytest.raises(UnsupportedLayerError) as caught:
        clipped(model, values(4, *shape), np.ones(4, np.float32), 1.0)
    return str(caught.value)


def test_dropout_inside_is_refused() -> None:
    layer = Noisy()
    message = refusal(sequential(layer, 3), 3)
    assert layer.path in message
    assert "(Noisy)" in message
    assert "ropout" in message


def test_dropout_beside_is_fine() -> None:
    inputs = keras.Input((3,))
    outputs = keras.layers.Dropout(0.5)(Affine()(inputs))
    result = clipped(keras.Model(inputs, outputs), values(4, 3), np.ones(4, np.float32), 1.0)
    assert result.finite.all()


def test_recurrent_dropout_is_refused() -> None:
    class OwnLSTM(keras.layers.LSTM):
        """A subclass has no rule."""

    layer = OwnLSTM(3, dropout=0.5)
    message = refusal(sequential(layer, 4, 3), 4, 3)
    assert layer.path in message
    assert "dropout" in message


def test_above_the_memory_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "MEMORY_BUDGET", 4 * 4 * 6 - 1)  # 4 examples of 6 parameters
    layer = Affine()
    message = refusal(sequential(layer, 3), 3)
    assert layer.path in message
    assert "96 bytes at a batch of 4 (limit 95)" in message
    assert "Use microbatch_size" in message
    monkeypatch.setattr(fallback, "MEMORY_BUDGET", 4 * 4 * 6)
    assert_as_brute_force(sequential(Affine(), 3), values(4, 3))


def test_the_memory_budget_counts_the_capacity_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the examples of the batch that happened to come first."""
    monkeypatch.setattr(fallback, "MEMORY_BUDGET", 20 * 4 * 6 - 1)
    model, plan = sequential(Affine(), 3), plan_for(4, capacity=20)
    model.compile(optimizer=DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x, y = values(4, 3), values(4, 2)
    with pytest.raises(UnsupportedLayerError, match=r"at a batch of 20 \(limit 479\)"):
        model.fit(plan.sampling.batches((x, y)), verbose=0)


def test_a_tensor_without_a_batch_axis_is_refused() -> None:
    class Scaled(Affine):
        def call(self, inputs: Any, factor: Any = None) -> Any:
            return super().call(inputs) * factor

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled(name="scaled")

        def call(self, inputs: Any) -> Any:
            return self.scaled(inputs, factor=tf.constant(2.0))

    model = Model()
    model(values(1, 3))
    message = refusal(model, 3)
    assert "scaled" in message
    assert "without a batch axis; pass constants as attributes" in message
