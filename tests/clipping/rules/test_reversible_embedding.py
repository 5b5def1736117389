"""Tied and untied output layers: exact against brute force, and nothing of [batch, rows, width]."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse import clipping
from dp_sparse.clipping import uses
from dp_sparse.clipping.tied import Tied
from tests.clipping_cases import assert_as_brute_force


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def language_model(
    rows: int, width: int, length: int, *, tied: bool, last: bool, masked: bool, cap: float | None
) -> keras.Model:
    ids = keras.Input((length,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(
        rows, width, tie_weights=tied, mask_zero=masked, logit_soft_cap=cap
    )
    hidden = keras.layers.Dense(width, activation="tanh")(table(ids))
    if last:
        hidden = hidden[:, -1]
    return keras.Model(ids, table(hidden, reverse=True))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(2, 9),
    width=st.integers(1, 4),
    length=st.integers(1, 5),
    tied=st.booleans(),
    last=st.booleans(),
    masked=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_language_models(
    rows: int,
    width: int,
    length: int,
    tied: bool,
    last: bool,
    masked: bool,
    cap: float | None,
    seed: int,
) -> None:
    keras.utils.set_random_seed(seed)
    model = language_model(rows, width, length, tied=tied, last=last, masked=masked, cap=cap)
    ids = np.random.default_rng(seed).integers(1 if masked else 0, rows, (4, length))
    assert_as_brute_force(model, ids)


def test_looked_up_by_two_features_and_tied() -> None:
    one, two = (keras.Input((3,), dtype="int32") for _ in range(2))
    table = keras.layers.ReversibleEmbedding(6, 4)
    hidden = keras.layers.Dense(4)(keras.layers.Concatenate(axis=1)([table(one), table(two)]))
    model = keras.Model([one, two], table(hidden, reverse=True))
    rng = np.random.default_rng(0)
    assert_as_brute_force(model, [rng.integers(0, 6, (4, 3)) for _ in range(2)])


def test_a_tied_table_is_dense_and_an_untied_one_a_table() -> None:
    for tied in (True, False):
        model = language_model(6, 4, 3, tied=tied, last=False, masked=False, cap=None)
        assert len(clipping.embedding_tables(model)) == (not tied)


def test_only_looked_up() -> None:
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.layers.ReversibleEmbedding(6, 4)(ids))
    assert_as_brute_force(model, np.random.default_rng(0).integers(0, 6, (4, 3)))


@pytest.mark.parametrize("scale", [1e-8, 1.0])
def test_terms_that_cancel_are_not_taken_for_nothing(scale: float) -> None:
    """As a table and as a matrix the gradients of one row cancel but for a little."""
    hidden = np.full((1, 1, 2), 1000.0, np.float32)
    logits = np.zeros((1, 1, 5), np.float32)
    logits[..., 3] = 1.0
    rows = -1000.0 * np.ones((1, 1, 2), np.float32) + np.float32(scale)
    use = Tied(
        5,
        tf.constant([[3]], tf.int64),
        tf.constant([[True]]),
        *map(tf.constant, (rows, hidden, logits)),
    )
    [norm] = np.sqrt(use.squared_norms())
    exact = np.linalg.norm(hidden[0, 0].astype(np.float64) + rows[0, 0])
    assert norm >= exact
    assert norm <= max(exact, 2 * 1000 * math.sqrt(2) / 1000) * 1.01


def test_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses, "CHUNK_ENTRIES", 8)  # two rows of width 4
    model = language_model(7, 4, 5, tied=True, last=False, masked=False, cap=None)
    assert_as_brute_force(model, np.random.default_rng(0).integers(0, 7, (3, 5)))


def test_no_tensor_of_batch_times_rows_times_width() -> None:
    batch, rows, width, length = 5, 40_009, 16, 3
    arguments = [(batch, length, width), (batch, length, width), (batch, length, rows)]

    @tf.function
    def both(ids: tf.Tensor, *parts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        use = Tied(rows, ids, tf.ones_like(ids, tf.bool), *parts)
        return use.squared_norms(), use.clipped_sum(tf.ones([batch]))

    graph = both.get_concrete_function(
        tf.TensorSpec([batch, length], tf.int64), *(tf.TensorSpec(shape) for shape in arguments)
    ).graph
    largest = max(
        math.prod(tensor.shape)
        for operation in graph.get_operations()
        for tensor in operation.outputs
        if tensor.shape.is_fully_defined()
    )
    assert largest < batch * rows * width / 2
