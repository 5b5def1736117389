"""keras-hub's position embeddings and the transformers made with them, all without the fallback."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import clipping
from tests.clipping.brute_force import assert_as_brute_force, clipped, values
from tests.training_cases import checks_of, plan_for, weights_of

keras_hub = pytest.importorskip("keras_hub")
hub = keras_hub.layers


def ids(*shape: int, rows: int = 9, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, rows, shape).astype(np.int32)


def after(inputs: Any, outputs: Any) -> keras.Model:
    """A nonlinear head, so that the cotangents of the examples differ."""
    return keras.Model(inputs, keras.layers.Dense(2, activation="tanh")(outputs))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 5),
    width=st.integers(1, 4),
    spare=st.integers(0, 4),
    start=st.integers(0, 4),
    middle=st.lists(st.integers(1, 3), max_size=1),
    padding=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_positions_from_a_start(
    length: int, width: int, spare: int, start: int, middle: list[int], padding: int, seed: int
) -> None:
    keras.utils.set_random_seed(seed)
    start = min(start, spare)
    layer = hub.PositionEmbedding(length + spare)
    x = keras.Input((*middle, length, width))
    model = after(x, x + layer(x, start_index=start))
    assert_as_brute_force(model, values(4, *middle, length, width, seed=seed), padding=padding)
    assert clipping.embedding_tables(model) == []


@settings(max_examples=20, deadline=None)
@given(
    length=st.integers(1, 6),
    rows=st.integers(1, 4),
    middle=st.lists(st.integers(1, 3), max_size=1),
    seed=st.integers(0, 99),
)
def test_positions_of_each_example(length: int, rows: int, middle: list[int], seed: int) -> None:
    """Packed sequences: a position may occur several times in an example."""
    keras.utils.set_random_seed(seed)
    x, positions = keras.Input((*middle, length, 3)), keras.Input((*middle, length), dtype="int32")
    model = after([x, positions], x + hub.PositionEmbedding(rows)(x, positions=positions))
    given_positions = np.random.default_rng(seed).integers(0, rows, (4, *middle, length))
    assert_as_brute_force(model, [values(4, *middle, length, 3, seed=seed), given_positions])


def test_the_same_positions_for_all_examples() -> None:
    x = keras.Input((4, 3))
    layer = hub.PositionEmbedding(6)
    model = after(x, x + layer(x, positions=np.array([5, 0, 0, 2])))
    assert_as_brute_force(model, values(5, 4, 3))


def test_called_three_times() -> None:
    """From two starts and at given positions: one gradient, whose norm is taken once."""
    x = keras.Input((4, 3))
    layer = hub.PositionEmbedding(6)
    rows = [layer(x), layer(x[:, :3], start_index=2), layer(x, positions=np.array([1, 1, 0, 5]))]
    model = after(x, keras.layers.Concatenate(axis=1)([keras.layers.Dense(3)(r) for r in rows]))
    assert_as_brute_force(model, values(5, 4, 3))


def test_a_start_and_a_length_known_at_run_time_only() -> None:
    class Decoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.positions = hub.PositionEmbedding(7)
            self.head = keras.layers.Dense(2, activation="tanh")

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            start = tf.cast(tf.shape(inputs)[1] // 2, tf.int32)
            return self.head(inputs + self.positions(inputs, start_index=start))

    model, x = Decoder(), values(3, 4, 2)
    model(x)
    assert_as_brute_force(model, x)
    assert dp_sparse.check_model(model, x).ok

    @tf.function(input_signature=[tf.TensorSpec([None, None, 2])])
    def sums(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            recording = clipping.record(model, inputs, tape, batch_capacity=4)
            losses = tf.reduce_sum(recording.outputs, axis=[1, 2])
        terms = recording.terms(tape.gradient(losses, recording.targets))
        found = clipping.scaled(terms, 0.1, losses, tf.ones_like(losses)).dense_sums()
        return found[id(model.positions.position_embeddings)]

    assert np.any(sums(x)[2:6] != 0, axis=1).all()
    np.testing.assert_array_equal(sums(x)[:2], 0)
    np.testing.assert_array_equal(sums(x[:0]), 0)  # an empty batch


def test_mixed_precision_and_frozen() -> None:
    x = keras.Input((4, 3))
    frozen = hub.PositionEmbedding(4)
    trained = hub.PositionEmbedding(6, dtype="mixed_bfloat16")
    rows = keras.layers.Add()([x, frozen(x), trained(x)])
    frozen.trainable = False
    model = after(x, rows)
    assert_as_brute_force(model, values(5, 4, 3), tolerance=2e-2)
    assert len(model.trainable_variables) == 3


def test_without_an_axis_of_positions() -> None:
    """The layer would take the examples for positions."""
    x = keras.Input((3,))
    model = keras.Model(x, hub.PositionEmbedding(4, name="place")(x))
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="place .* may mix examples"):
        clipped(model, values(4, 3), np.ones(4, np.float32), 1.0)


def test_positions_along_another_axis_than_the_examples() -> None:
    x, positions = keras.Input((4, 5, 3)), keras.Input((5,), dtype="int32")
    model = keras.Model([x, positions], hub.PositionEmbedding(5)(x, positions=positions))
    with pytest.raises(dp_sparse.UnsupportedLayerError, match="may mix examples"):
        clipped(model, [values(4, 4, 5, 3), ids(4, 5, rows=5)], np.ones(4, np.float32), 1.0)


@pytest.mark.parametrize("bad", [-1, 4])
def test_positions_out_of_range(bad: int) -> None:
    x = keras.Input((2, 3))
    layer = hub.PositionEmbedding(4, name="place")
    model = keras.Model(x, layer(x, positions=np.array([0, bad])))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"positions in \[0, 4\) at .*place"):
        clipped(model, values(2, 2, 3), np.ones(2, np.float32), 1.0)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(tied=st.booleans(), masked=st.booleans(), length=st.integers(1, 5), seed=st.integers(0, 99))
def test_tokens_and_positions(tied: bool, masked: bool, length: int, seed: int) -> None:
    keras.utils.set_random_seed(seed)
    layer = hub.TokenAndPositionEmbedding(9, length + 1, 4, tie_weights=tied, mask_zero=masked)
    x = keras.Input((length,), dtype="int32")
    model = after(x, layer(x))
    assert_as_brute_force(model, ids(4, length, seed=seed))
    check = dp_sparse.check_model(model)
    assert check.rules[layer.token_embedding.embeddings.path] == "reversible embedding"
    assert check.rules[layer.position_embedding.position_embeddings.path] == "position embedding"


@pytest.mark.parametrize("tied", [True, False])
def test_its_reversible_embedding_has_the_rule_of_keras(tied: bool) -> None:
    x = keras.Input((4,), dtype="int32")
    table = hub.ReversibleEmbedding(9, 3, tie_weights=tied)
    model = keras.Model(x, table(keras.layers.Dense(3)(table(x)), reverse=True))
    assert_as_brute_force(model, ids(5, 4))
    assert clipping.embedding_tables(model) == ([] if tied else [table.embeddings])
    assert "fallback" not in dp_sparse.check_model(model).rules.values()


@pytest.mark.parametrize("kind", ["BertBackbone", "RobertaBackbone", "GPT2Backbone"])
def test_words_of_a_backbone_are_a_table(kind: str) -> None:
    """Its reversible embedding is called without `reverse`; BERT's segments are a table, too."""
    sizes = {"vocabulary_size": 11, "num_layers": 1, "num_heads": 2, "hidden_dim": 4}
    backbone = getattr(keras_hub.models, kind)(**sizes, intermediate_dim=8, max_sequence_length=6)
    tables = clipping.embedding_tables(backbone)
    assert backbone.token_embedding.embeddings in tables
    assert len(tables) == 1 + (kind == "BertBackbone")


def encoder() -> keras.Model:
    x = keras.Input((6,), dtype="int32")
    rows = hub.TokenAndPositionEmbedding(9, 8, 4, mask_zero=True)(x)
    rows = hub.TransformerEncoder(8, 2, dropout=0.1)(rows)
    return keras.Model(x, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(rows)))


def decoder() -> keras.Model:
    x = keras.Input((6,), dtype="int32")
    table = hub.ReversibleEmbedding(9, 4)
    rows = table(x)
    rows = hub.TransformerDecoder(8, 2, normalize_first=True)(rows + hub.PositionEmbedding(6)(rows))
    return keras.Model(x, table(rows, reverse=True))


def translator() -> keras.Model:
    source, target = (keras.Input((n,), dtype="int32") for n in (5, 6))
    rows, own = (keras.layers.Embedding(9, 4)(v) for v in (source, target))
    encoded = hub.TransformerEncoder(8, 2)(rows + hub.SinePositionEncoding()(rows))
    decoded = hub.TransformerDecoder(8, 2)(hub.RotaryEmbedding()(own), encoded)
    return keras.Model([source, target], keras.layers.Dense(9)(decoded))


def cached() -> keras.Model:
    x = keras.Input((6,), dtype="int32")
    rows = keras.layers.Embedding(9, 4)(x)
    attention = hub.CachedMultiHeadAttention(2, 2)
    return keras.Model(x, keras.layers.Dense(1)(attention(hub.RotaryEmbedding()(rows), rows)))


@pytest.mark.slow
@pytest.mark.parametrize("build", [encoder, decoder, translator, cached])
def test_transformers(build: Any) -> None:
    keras.utils.set_random_seed(1)
    model = build()
    inputs = [ids(4, part.shape[1], seed=i) for i, part in enumerate(model.inputs)]
    check = dp_sparse.check_model(model)
    assert check.ok and not {"fallback", "none"} & set(check.rules.values()), check
    if build is not encoder:  # its dropout draws other masks for each example
        assert_as_brute_force(model, inputs if len(inputs) > 1 else inputs[0])


@pytest.mark.slow
def test_fit() -> None:
    keras.utils.set_random_seed(1)
    examples = 12
    model, plan = encoder(), plan_for(examples, steps=3)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(0.1), plan, clip_norm=0.1)
    model.compile(optimizer=optimizer, loss="mse")
    before = weights_of(model)
    history = model.fit(plan.sampling.batches((ids(examples, 6), values(examples, 1))), verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    for old, weight in zip(before, model.trainable_variables, strict=True):
        assert not np.array_equal(old, weight), weight.path
    assert checks_of(model) == 3
