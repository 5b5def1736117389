"""Ids that were floats are refused where a float cannot hold them all."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.clipping.named_inputs import floats_of
from dp_sparse.core import BadExampleError


def looked_up(dtype: str, rows: int, between: Callable[[Any], Any] = lambda x: x) -> keras.Model:
    ids = keras.Input((2,), dtype=dtype)
    return keras.Model(ids, keras.layers.Embedding(rows, 1, name="table")(between(ids)))


@pytest.mark.parametrize(
    ("dtype", "exact"), [("bfloat16", 2**8), ("float16", 2**11), ("float32", 2**24)]
)
def test_a_table_may_have_as_many_rows_as_the_float_holds_integers(dtype: str, exact: int) -> None:
    assert dp_sparse.check_model(looked_up(dtype, exact)).ok
    (problem,) = dp_sparse.check_model(looked_up(dtype, exact + 1)).problems
    assert problem.startswith(f"table/embeddings: its ids pass through {dtype}")
    assert f"up to {exact:,} only" in problem and "dtype='int32'" in problem


class Within(keras.layers.Layer):
    """A table of a user's own layer, frozen or not, which Keras' operations look up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table = self.add_weight(shape=(300, 1), name="own")

    def call(self, ids: Any) -> Any:
        return keras.ops.take(self.table, keras.ops.cast(ids, "int32"), axis=0)


@pytest.mark.parametrize(
    "table",
    [
        keras.layers.Embedding(300, 1, trainable=False),
        keras.layers.ReversibleEmbedding(300, 1),
        Within(),
        Within(trainable=False),
    ],
    ids=lambda table: f"{type(table).__name__}-{table.trainable}",
)
def test_every_kind_of_lookup_counts(table: keras.layers.Layer) -> None:
    ids = keras.Input((2,), dtype="bfloat16")
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    (problem,) = dp_sparse.check_model(model).problems
    assert table.path in problem and "300 rows" in problem


@pytest.mark.parametrize(
    "between",
    [
        lambda x: keras.ops.cast(keras.ops.cast(x, "bfloat16"), "float32"),
        lambda x: keras.ops.concatenate([x[:, 1:], x[:, :1]], 1) + 1,
        lambda x: keras.ops.reshape(keras.ops.cast(keras.ops.stack([x, x], 1), "int32"), (-1, 4)),
        keras.layers.Identity(dtype="bfloat16"),
    ],
    ids=["through bfloat16", "moved and shifted", "cast and stacked", "a layer's dtype"],
)
def test_floats_on_the_way_are_found(between: Any) -> None:
    model = looked_up("float32", 2**24 + 1, between)
    assert not dp_sparse.check_model(model).ok


@pytest.mark.parametrize(
    "between",
    [
        keras.layers.Discretization([0.5, 1.5]),
        keras.layers.Hashing(1000),
        lambda x: keras.ops.cast(keras.ops.floor(x * 999), "int32"),
        lambda x: keras.ops.argmax(keras.ops.stack([x, x], -1), -1),
    ],
    ids=["bins", "hashes", "computed", "argmax"],
)
def test_ids_that_are_computed_from_floats_are_none_of_them(between: Any) -> None:
    assert dp_sparse.check_model(looked_up("bfloat16", 1000, between)).ok


def test_ids_that_were_integers_from_the_input_on_have_no_floats() -> None:
    found: list[Any] = []

    def trace(ids: tf.Tensor) -> None:
        found.extend(floats_of(tf.cast(ids[:, 0], tf.int32) + 1))

    for dtype in (tf.int64, tf.float32):
        tf.function(trace).get_concrete_function(tf.TensorSpec([None, 2], dtype))
        assert bool(found) == dtype.is_floating
    assert floats_of(tf.constant([1])) == []


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_id_that_is_no_number_is_told_as_that(dtype: str, bad: float) -> None:
    x = np.array([[1.0, 2.0], [3.0, bad]])
    with pytest.raises(BadExampleError, match=r"Expected ids in \[0, 9\) at layer table.*got nan"):
        dp_sparse.check_model(looked_up(dtype, 9), x)


def test_a_missing_number_beside_an_id_is_no_missing_id() -> None:
    """One packed input: the first column is looked up, the other holds numbers."""
    packed = keras.Input((2,))
    row = keras.layers.Embedding(9, 1, name="table")(keras.ops.cast(packed[:, 0], "int32"))
    known = keras.ops.where(keras.ops.isnan(packed[:, 1:]), 0.0, packed[:, 1:])
    model = keras.Model(packed, keras.layers.Dense(1)(keras.ops.concatenate([row, known], 1)))
    x = np.array([[1.0, 0.5], [2.0, np.nan], [3.0, 0.1], [4.0, 0.2]], np.float32)
    assert dp_sparse.check_model(model, x).ok
    x[0, 0] = np.nan
    with pytest.raises(BadExampleError, match=r"Expected ids in \[0, 9\) at layer table.*got nan"):
        dp_sparse.check_model(model, x)
