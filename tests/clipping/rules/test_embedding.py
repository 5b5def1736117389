"""Embedding: several features on one table, repetitions inside an example, masks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import clipping
from tests.clipping.brute_force import assert_as_brute_force, clipped, ids


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    features=st.integers(1, 3),
    lookups=st.integers(1, 6),
    rows=st.integers(1, 5),
    width=st.integers(1, 4),
    masked=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_several_features_on_one_table(
    features: int, lookups: int, rows: int, width: int, masked: bool, weighted: bool, seed: int
) -> None:
    """Fewer rows than lookups, so ids repeat inside an example and between features."""
    keras.utils.set_random_seed(seed)
    table = keras.layers.Embedding(rows, width, mask_zero=masked)
    inputs = [keras.Input((lookups,), dtype="int32") for _ in range(features)]
    pooled = [keras.layers.GlobalAveragePooling1D()(table(feature)) for feature in inputs]
    joined = keras.layers.Concatenate()(pooled) if features > 1 else pooled[0]
    model = keras.Model(inputs, keras.layers.Dense(2)(joined))
    x = [ids(4, lookups, rows=rows, seed=seed + i) for i in range(features)]
    x[0][:, 0] = rows - 1  # at least one lookup that is not masked, where there is such a row
    if masked and rows == 1:
        return  # every lookup masked: the pooled mean is 0/0
    for feature in x:
        feature[:, -1] = rows - 1
    assert_as_brute_force(model, x, seed=seed, weighted=weighted)


def test_masked_lookups_do_not_train_row_0() -> None:
    table = keras.layers.Embedding(5, 3, mask_zero=True)
    model = keras.Sequential([keras.Input((4,), dtype="int32"), table])
    model.add(keras.layers.Flatten())
    x = np.array([[1, 0, 0, 0], [2, 2, 0, 3]], np.int32)
    result = clipped(model, x, np.ones(2, np.float32), 10.0)
    np.testing.assert_array_equal(result.sums[0][0], 0)
    assert np.all(np.any(result.sums[0][1:4] != 0, axis=1))


def test_one_row_a_scalar_feature() -> None:
    inputs = keras.Input((), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Embedding(6, 3)(inputs)))
    assert_as_brute_force(model, ids(5))


def test_ids_of_rank_3() -> None:
    model = keras.Sequential([keras.Input((2, 3), dtype="int32"), keras.layers.Embedding(6, 3)])
    model.add(keras.layers.Dense(2))
    assert_as_brute_force(model, ids(4, 2, 3))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float32"])
def test_ids_of_every_type(dtype: str) -> None:
    model = keras.Sequential([keras.Input((2,), dtype=dtype), keras.layers.Embedding(6, 3)])
    assert_as_brute_force(model, ids(4, 2).astype(dtype))


def test_two_tables_share_one_norm_with_the_dense_layers() -> None:
    x = [ids(5, 2), ids(5, 3, seed=1)]
    inputs = [keras.Input((n,), dtype="int32") for n in (2, 3)]
    rows = [
        keras.layers.Flatten()(keras.layers.Embedding(6, 2 + i)(v)) for i, v in enumerate(inputs)
    ]
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()(rows)))
    assert_as_brute_force(model, x, padding=2)


def test_rows_outside_the_choice_are_zeroed_before_clipping() -> None:
    """With row 1 not chosen, an example's norm is that of its other rows alone."""
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(4, 3)])
    x, y = tf.constant([[1, 2], [1, 1]]), np.ones(2, np.float32)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, x, tape, batch_capacity=2)
        losses = tf.reduce_sum(tf.square(recording.outputs), axis=[1, 2])
    [(table, term)] = recording.terms(tape.gradient(losses, recording.targets))
    chosen = term.restricted(tf.constant([[-1, 0], [-1, -1]]), tf.constant([2], tf.int64))
    result = clipping.scaled([(table, chosen)], 0.1, losses, tf.ones(2))
    row_2 = 2 * table.numpy()[2]
    np.testing.assert_allclose(result.squared_norms, [np.sum(row_2**2), 0], rtol=1e-5, atol=1e-30)
    expected = row_2 * min(1, 0.1 / np.linalg.norm(row_2))
    sums = result.row_sums({id(table): tf.constant(1)})[id(table)]
    np.testing.assert_allclose(sums[0], expected, rtol=1e-5)
    del y


@pytest.mark.parametrize("bad", [-1, 6])
def test_ids_out_of_range_eagerly(bad: int) -> None:
    """`fit` turns the failure into a BadExampleError; here the sentence is inside TensorFlow's."""
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(6, 3, name="words")]
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 6\) at layer \S*words"):
        clipped(model, np.array([[0, bad]], np.int32), np.ones(1, np.float32), 1.0)


def test_tables_are_the_variables_used_through_lookups_alone() -> None:
    inputs = keras.Input((2,), dtype="int32")
    frozen = keras.layers.Embedding(6, 3)
    frozen.trainable = False
    words = keras.layers.Embedding(6, 3, name="words")
    model = keras.Model(
        inputs, keras.layers.Dense(1)(keras.layers.Add()([words(inputs), frozen(inputs)]))
    )
    assert clipping.embedding_tables(model) == [words.embeddings]
    assert_as_brute_force(model, ids(4, 2))


def test_a_subclass_of_embedding_is_not_taken_for_a_lookup() -> None:
    class Scaled(keras.layers.Embedding):
        def call(self, inputs):
            return 3.0 * super().call(inputs)

    model = keras.Sequential([keras.Input((2,), dtype="int32"), Scaled(6, 3)])
    assert_as_brute_force(model, ids(4, 2))
    assert clipping.embedding_tables(model) == []


def test_a_tied_head_is_refused_by_path() -> None:
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.words = keras.layers.Embedding(6, 3, name="words")

        def call(self, inputs):
            return tf.matmul(self.words(inputs), tf.transpose(self.words.embeddings))

    model = Tied()
    model(ids(1, 2))
    with pytest.raises(
        dp_sparse.UnsupportedLayerError, match="words/embeddings: read outside the layer"
    ):
        clipped(model, ids(4, 2), np.ones(4, np.float32), 1.0)
