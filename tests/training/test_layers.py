"""Every kind of layer through `compile` and `fit`, with its guards and checks of isolation."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

import dp_sparse
from tests.training_cases import checks_of, plan_for

layers = keras.layers
SIZE = 12


def images(*hidden: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((8, 8, 2)), *hidden, layers.Flatten(), layers.Dense(1)])


def rows(*hidden: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((6, 4)), *hidden, layers.Flatten(), layers.Dense(1)])


def transformer() -> keras.Model:
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(ids)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x)))
    return keras.Model(ids, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def language_model() -> keras.Model:
    ids = keras.Input((6,), dtype="int32")
    table = layers.ReversibleEmbedding(20, 8)
    x = layers.GRU(8, return_sequences=True)(table(ids))
    return keras.Model(ids, table(x, reverse=True))


def adapted() -> keras.Model:
    model = transformer()
    for layer in model.layers:
        if type(layer) in (layers.Dense, layers.Embedding):
            layer.enable_lora(2)
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    "convolution": lambda: images(layers.Conv2D(3, 3, activation="relu"), layers.MaxPooling2D()),
    "separable": lambda: images(layers.SeparableConv2D(3, 3), layers.DepthwiseConv2D(2)),
    "transposed": lambda: images(layers.Conv2DTranspose(2, 3, strides=2), layers.PReLU()),
    "groups": lambda: images(layers.Conv2D(4, 3, groups=2), layers.GroupNormalization(2)),
    "simple": lambda: rows(layers.SimpleRNN(5)),
    "lstm": lambda: rows(layers.LSTM(5, dropout=0.2, recurrent_dropout=0.2)),
    "cells": lambda: rows(layers.RNN(layers.LSTMCell(5, dropout=0.2))),
    "stacked cells": lambda: rows(layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)])),
    "activation": lambda: rows(layers.Flatten(), layers.Dense(3, activation=layers.PReLU())),
    "gru": lambda: rows(layers.Bidirectional(layers.GRU(5, return_sequences=True))),
    "conv1d": lambda: rows(layers.Conv1D(3, 2, padding="causal"), layers.RMSNormalization()),
    "distributed": lambda: rows(layers.TimeDistributed(layers.Dense(3))),
    "transformer": transformer,
    "language model": language_model,
    "adapted": adapted,
}


class WithAFlag(keras.Model):
    """`training` has no default; one layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.unused = layers.Dense(1), layers.Dense(2)

    def call(self, inputs: keras.KerasTensor, training: bool) -> keras.KerasTensor:
        assert training in (True, False)
        return self.dense(inputs)


def test_a_flag_without_default_beside_an_unused_layer() -> None:
    model, plan = WithAFlag(), plan_for(SIZE, steps=2)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x = np.ones((SIZE, 3), np.float32)
    model.fit(plan.sampling.batches((x, x[:, :1])), verbose=0)
    assert int(model.optimizer.steps_spent) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM])
def test_an_empty_text_is_left_out_and_nothing_else(kind: type[layers.RNN]) -> None:
    """Keras' mean over no word is not finite, and so is the whole gradient of that text."""
    ids = keras.Input((6,), dtype="int32")
    hidden = kind(4, return_sequences=True)(layers.Embedding(20, 8, mask_zero=True)(ids))
    outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden))
    model, plan = keras.Model(ids, outputs), plan_for(SIZE, steps=2)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x = np.random.default_rng(0).integers(1, 20, (SIZE, 6)).astype(np.int32)
    x[3] = 0
    model.fit(plan.sampling.batches((x, np.ones((SIZE, 1), np.float32))), verbose=0)
    assert int(model.optimizer.diagnostics.not_finite) == 2
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


@pytest.mark.cases(1)
@pytest.mark.parametrize("microbatch_size", [None, 5])
@pytest.mark.parametrize("name", MODELS)
def test_trains(name: str, microbatch_size: int | None) -> None:
    keras.utils.set_random_seed(1)
    model, plan = MODELS[name](), plan_for(SIZE, steps=4)
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.SGD(0.1), plan, clip_norm=0.1, microbatch_size=microbatch_size
    )
    sparse = name == "language model"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if sparse else "mse"
    model.compile(optimizer=optimizer, loss=loss)
    rng = np.random.default_rng(0)
    shape = (SIZE, *model.input_shape[1:])
    whole = model.inputs[0].dtype == "int32"
    x = rng.integers(1, 20, shape).astype(np.int32) if whole else rng.normal(size=shape)
    y = x if sparse else rng.normal(size=(SIZE, 1))
    before = {v.path: np.array(v) for v in model.trainable_variables}
    history = model.fit(
        plan.sampling.batches((np.asarray(x, x.dtype if whole else np.float32), y)), verbose=0
    )
    assert np.all(np.isfinite(history.history["loss"]))
    assert checks_of(model) == 3
    after = {v.path: np.array(v) for v in model.trainable_variables}  # some come with a call, as 0
    assert len(after) == len(model.trainable_variables)
    assert all(np.any(new != before.get(path, 0.0)) for path, new in after.items())


def test_text_where_ids_are_wanted_is_told_what_maps_it() -> None:
    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.dense = layers.Embedding(20, 8, name="cities"), layers.Dense(1)

        def call(self, x: str) -> object:
            return self.dense(self.table(x))

    plan = plan_for(SIZE)
    model = Subclassed()
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    data = np.array(["Rome"] * SIZE), np.ones((SIZE, 1), np.float32)
    with pytest.raises(ValueError, match=r"ids at layer .*cities, got text\..*StringLookup"):
        model.fit(plan.sampling.batches(data), verbose=0)
