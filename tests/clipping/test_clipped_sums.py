"""The sums of a batch: parts add up to the whole."""

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.clipping import Amounts, ClippedSums, zero_sums

DENSE, TABLE = (keras.Variable(np.zeros(shape, np.float32)) for shape in ((3,), (5, 2)))
ROW_IDS = tf.constant([0, 4], tf.int64)


def amounts(seed: int, dtype: str = "float32") -> Amounts:
    rng = np.random.default_rng(seed)
    return Amounts(
        [tf.constant(rng.normal(size=3), dtype)],
        [tf.constant(rng.normal(size=(2, 2)), tf.float64)],
        tf.constant(rng.integers(0, 9, 3), tf.int64),
        tf.constant(rng.normal(), tf.float64),
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_parts_add_up_in_float64(seeds: list[int]) -> None:
    parts = [amounts(seed) for seed in seeds]
    whole = zero_sums([DENSE], [TABLE], [ROW_IDS]).amounts
    for part in parts:
        whole = whole.plus(part)
    assert whole.dense[0].dtype == whole.rows[0].dtype == tf.float64
    for name in ("dense", "rows"):
        expected = np.sum([getattr(part, name)[0].numpy().astype(float) for part in parts], 0)
        np.testing.assert_allclose(getattr(whole, name)[0], expected, rtol=1e-12, atol=1e-12)
    for name in ("counts", "statistic"):
        expected = np.sum([getattr(part, name).numpy() for part in parts], 0)
        np.testing.assert_allclose(getattr(whole, name), expected, rtol=1e-12)


def test_zero_sums_have_the_shapes_of_variables_and_rows() -> None:
    nothing = zero_sums([DENSE], [TABLE], [ROW_IDS])
    shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(nothing.amounts)]
    assert shapes == [(3,), (2, 2), (3,), ()]
    assert not any(np.any(leaf) for leaf in tf.nest.flatten(nothing.amounts))


def test_slices_name_the_rows_of_the_choice() -> None:
    sums = ClippedSums([DENSE], [TABLE], [ROW_IDS], amounts(0))
    [rows] = sums.slices
    np.testing.assert_array_equal(rows.indices, [0, 4])
    np.testing.assert_array_equal(rows.values, sums.amounts.rows[0])
