"""The contribution map against dense vectors, and its sensitivity."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.selection.contribution import (
    ContributionMap,
    TableLookups,
    contribution_map,
    unit_of,
)
from tests.reference import adafest

RUNS = settings(max_examples=120, deadline=None)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lookups of a batch: for each table its rows, and ids and validity `[batch, lookups]`."""

    table_rows: list[int]
    row_ids: list[np.ndarray]
    valid: list[np.ndarray]

    def lookups(self) -> list[TableLookups]:
        """As the library takes them."""
        return [
            TableLookups(rows, tf.constant(ids, tf.int64), tf.constant(valid, tf.bool))
            for rows, ids, valid in zip(self.table_rows, self.row_ids, self.valid, strict=True)
        ]

    def examples(self) -> list[adafest.Example]:
        """As the reference takes them."""
        return [
            [ids[i][valid[i]] for ids, valid in zip(self.row_ids, self.valid, strict=True)]
            for i in range(len(self.row_ids[0]))
        ]

    def without(self, example: int, *, zeroed_out: bool) -> "Batch":
        """The neighbour: one example removed, or in its place padding."""
        if not zeroed_out:
            ids = [np.delete(each, example, axis=0) for each in self.row_ids]
            return Batch(
                self.table_rows, ids, [np.delete(each, example, axis=0) for each in self.valid]
            )
        valid = [each & (np.arange(len(each)) != example)[:, None] for each in self.valid]
        return Batch(self.table_rows, self.row_ids, valid)


@st.composite
def batches(draw: st.DrawFn, smallest: int = 0) -> Batch:
    """Few rows, many lookups: features meet on a row, in an example and across examples."""
    table_rows = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    only_one_lookup = draw(st.booleans())
    size = draw(st.integers(smallest, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    present = rng.random(size) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    unmasked = draw(st.sampled_from([0.0, 0.6, 1.0]))
    row_ids, valid = [], []
    for rows in table_rows:
        lookups = 1 if only_one_lookup else draw(st.integers(1, 5))
        row_ids.append(rng.integers(0, rows, (size, lookups)))
        valid.append(present[:, None] & (rng.random((size, lookups)) < unmasked))
    return Batch(table_rows, row_ids, valid)


def dense(contributions: ContributionMap) -> np.ndarray:
    """The map as a vector `[c]`; fails when a row comes twice."""
    rows = contributions.row_ids.numpy()
    assert len(set(rows.tolist())) == len(rows)
    vector = np.zeros(contributions.num_rows)
    vector[rows] = contributions.values.numpy()
    return vector


@RUNS
@given(batches(), st.floats(0.05, 5.0))
def test_map_equals_the_reference(batch: Batch, clip_norm: float) -> None:
    found = contribution_map(batch.lookups(), clip_norm)
    expected = adafest.contribution_map(batch.examples(), batch.table_rows, clip_norm)
    np.testing.assert_allclose(dense(found), expected, rtol=1e-5, atol=1e-6)


@RUNS
@given(batches())
def test_bookkeeping(batch: Batch) -> None:
    """All rows looked up are listed, valid or not, and each lookup knows where its row stands."""
    found = contribution_map(batch.lookups(), 1.0)
    offsets = np.concatenate([[0], np.cumsum(batch.table_rows)])
    np.testing.assert_array_equal(found.offsets, offsets)
    assert found.row_ids.dtype == tf.int64
    listed = found.row_ids.numpy()
    looked_up = [ids + offset for ids, offset in zip(batch.row_ids, offsets[:-1], strict=True)]
    assert set(listed.tolist()) == set(np.concatenate([ids.ravel() for ids in looked_up]).tolist())
    for ids, position in zip(looked_up, tf.split(found.places, found.widths, axis=1), strict=True):
        assert position.shape == ids.shape
        np.testing.assert_array_equal(listed[position.numpy()], ids)


@RUNS
@given(batches(smallest=1), st.floats(0.05, 5.0), st.booleans(), st.data())
def test_one_example_moves_the_map_by_at_most_c1(
    batch: Batch, clip_norm: float, zeroed_out: bool, data: st.DataObject
) -> None:
    example = data.draw(st.integers(0, len(batch.row_ids[0]) - 1))
    neighbour = batch.without(example, zeroed_out=zeroed_out)
    moved = dense(contribution_map(batch.lookups(), clip_norm)) - dense(
        contribution_map(neighbour.lookups(), clip_norm)
    )
    assert np.linalg.norm(moved) <= clip_norm * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("clip_norm", [0.3, 1.0, 2.0])
def test_several_features_on_one_row_count_once(clip_norm: float) -> None:
    """Five lookups of row 2 are one row; counted five times they would move the map by √5 · C1."""
    lookups = [TableLookups(4, tf.constant([[2, 2, 2, 2, 2]], tf.int64), tf.ones([1, 5], tf.bool))]
    found = dense(contribution_map(lookups, clip_norm))
    np.testing.assert_allclose(found, [0, 0, min(1.0, clip_norm), 0], rtol=1e-6)


def test_sensitivity_is_reached() -> None:
    """26 one-hot features at C1 = 1: the map moves by exactly C1, 1/√26 in each row."""
    one = tf.zeros([1, 1], tf.int64)
    lookups = [TableLookups(1, one, tf.ones([1, 1], tf.bool))] * 26
    values = contribution_map(lookups, 1.0).values.numpy()
    np.testing.assert_allclose(values, 0.19611613513818404, rtol=1e-6)
    assert np.linalg.norm(values) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("clip_norm", [0.7, 1.0, 1.1])
def test_sensitivity_holds_to_the_last_bit(clip_norm: float) -> None:
    """By exact arithmetic: shares rounded up, or to the nearest, would pass C1 for many sizes."""
    for size in range(1, 60):
        ids = tf.range(size, dtype=tf.int64)[tf.newaxis]
        lookups = [TableLookups(size, ids, tf.ones([1, size], tf.bool))]
        values = contribution_map(lookups, clip_norm).values.numpy().tolist()
        assert sum(Fraction(value) ** 2 for value in values) <= Fraction(clip_norm) ** 2


def test_a_masked_lookup_before_a_valid_one_of_the_same_row() -> None:
    ids = tf.constant([[3, 3, 1]], tf.int64)
    valid = tf.constant([[False, True, False]])
    found = contribution_map([TableLookups(5, ids, valid)], 1.0)
    np.testing.assert_allclose(dense(found), [0, 0, 0, 1, 0])


def test_rows_of_huge_tables_keep_their_numbers() -> None:
    """Row numbers and (example, row) pairs go beyond 2³¹ and 2⁵³ safely."""
    sizes = [3_000_000_000, 7_000_000_000]
    ids = [np.array([[0, 2_999_999_999], [5, 5]]), np.array([[6_999_999_999], [6_999_999_998]])]
    lookups = [
        TableLookups(size, tf.constant(each, tf.int64), tf.ones(each.shape, tf.bool))
        for size, each in zip(sizes, ids, strict=True)
    ]
    found = contribution_map(lookups, 1.0)
    assert found.num_rows == 10_000_000_000
    values = dict(zip(found.row_ids.numpy().tolist(), found.values.numpy().tolist(), strict=True))
    third, half = 1 / math.sqrt(3), 1 / math.sqrt(2)
    assert values == pytest.approx(
        {0: third, 2_999_999_999: third, 9_999_999_999: third, 5: half, 9_999_999_998: half}
    )


@pytest.mark.parametrize("lookups", [3, None])
@pytest.mark.parametrize("size", [0, 1, 4])
def test_sizes_unknown_to_the_graph(size: int, lookups: int | None) -> None:
    @tf.function(
        input_signature=[tf.TensorSpec([None, lookups], kind) for kind in (tf.int64, tf.bool)]
    )
    def traced(ids: tf.Tensor, valid: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        found = contribution_map([TableLookups(9, ids, valid), TableLookups(9, ids, valid)], 0.7)
        return found.row_ids, found.values, found.places

    ids = np.random.default_rng(size).integers(0, 9, (size, 3))
    valid = np.ones((size, 3), bool)
    rows, values, positions = traced(tf.constant(ids, tf.int64), tf.constant(valid, tf.bool))
    vector = np.zeros(18)
    vector[rows.numpy()] = values.numpy()
    expected = adafest.contribution_map([[row, row] for row in ids], [9, 9], 0.7)
    np.testing.assert_allclose(vector, expected, rtol=1e-5)
    assert positions.shape == (size, 6)


@pytest.mark.parametrize("examples", [1, 2**21, 2**21 + 1, 1024 * 70_000, 2**31, 2**40 + 1])
def test_sums_over_a_window_are_exact(examples: int) -> None:
    """The largest sum has at most 2⁵³ units, for float64, and no unit is larger than need be."""
    for clip_norm in (0.3, 1.0, 2.0):
        unit = unit_of(clip_norm, examples)
        most = examples * Fraction(min(1.0, clip_norm)) / Fraction(unit)
        assert most <= 2**53
        assert most > 2**51 or unit == min(1.0, clip_norm) / 2**32
        lookups = [TableLookups(9, tf.range(5, dtype=tf.int64)[None], tf.ones([1, 5], tf.bool))]
        found = contribution_map(lookups, clip_norm, examples)
        np.testing.assert_array_equal(found.values, unit * found.units.numpy().astype(float))
        share = min(clip_norm / np.sqrt(5), 1.0)
        np.testing.assert_array_equal(found.units, np.floor(share / unit))
