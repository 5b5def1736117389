"""Scores against a loop over examples, and the selected rows' distribution against exact sums."""

import collections
import functools
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dp_sparse import noise
from dp_sparse.core import xla
from dp_sparse.selection import exponential
from dp_sparse.selection.contribution import RowScores, TableLookups, row_scores
from dp_sparse.selection.exponential import select_top_rows, selected_by_table
from tests.reference import top_k as reference
from tests.reference.distributions import SIGNIFICANCE, chi_square
from tests.selection.runs import rows_of_runs


def scores_by_loop(tables: list[TableLookups], clip_norm: float) -> np.ndarray:
    """Σ_i min(1, C3/‖n_i‖∞)·n_i, over the rows of all tables."""
    sizes = [table.num_rows for table in tables]
    total = np.zeros(sum(sizes))
    for i in range(tables[0].row_ids.shape[0]):
        norms = []
        for table in tables:
            rows = np.zeros((table.num_rows, table.cotangents.shape[2]))
            for row, valid, cotangent in zip(
                table.row_ids[i].numpy(),
                table.valid[i].numpy(),
                table.cotangents[i].numpy(),
                strict=True,
            ):
                rows[row] += valid * cotangent
            norms.append(np.linalg.norm(rows, axis=1))
        own = np.concatenate(norms)
        if np.isfinite(own).all() and own.max() > 0:
            total += own * min(1.0, clip_norm / own.max())
    return total


def lookups(
    rng: np.random.Generator, sizes: list[int], batch: int, counts: list[int]
) -> list[TableLookups]:
    return [
        TableLookups(
            size,
            tf.constant(rng.integers(0, size, (batch, count))),
            tf.constant(rng.random((batch, count)) < 0.8),
            tf.constant(rng.normal(size=(batch, count, 2 + size % 3)), tf.float32),
        )
        for size, count in zip(sizes, counts, strict=True)
    ]


def dense(scores: RowScores) -> np.ndarray:
    values = np.zeros(scores.offsets[-1])
    there = scores.row_ids.numpy() < scores.offsets[-1]
    assert not scores.values.numpy()[~there].any()
    values[scores.row_ids.numpy()[there]] = scores.values.numpy()[there]
    return values


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    batch=st.integers(1, 6),
    counts=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    clip_norm=st.floats(0.05, 20),
    seed=st.integers(0, 99),
)
def test_scores_are_those_of_a_loop(
    sizes: list[int], batch: int, counts: list[int], clip_norm: float, seed: int
) -> None:
    tables = lookups(np.random.default_rng(seed), sizes, batch, counts[: len(sizes)])
    found = row_scores(tables, clip_norm)
    assert np.all(np.diff(found.row_ids.numpy()) > 0)
    wanted = scores_by_loop(tables, clip_norm)
    np.testing.assert_allclose(dense(found), wanted, rtol=1e-6, atol=1e-8 * clip_norm)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e38])
def test_an_example_moves_each_score_by_at_most_c(value: float) -> None:
    tables = lookups(np.random.default_rng(1), [7, 5], 4, [2, 1])
    for changed in (0, 1):
        cotangents = tables[changed].cotangents.numpy()
        cotangents[2] = value
        huge = [*tables]
        huge[changed] = TableLookups(
            tables[changed].num_rows, tables[changed].row_ids, tables[changed].valid, cotangents
        )
        without = [
            TableLookups(
                t.num_rows, t.row_ids, t.valid & (np.arange(4) != 2)[:, None], t.cotangents
            )
            for t in huge
        ]
        moved = dense(row_scores(huge, 0.3)) - dense(row_scores(without, 0.3))
        assert moved.min() >= 0 and moved.max() <= 0.3
        assert np.isfinite(moved).all()


def scored(total: int, values: dict[int, float]) -> RowScores:
    rows = sorted(values)
    return RowScores(
        np.array([0, total]),
        tf.constant(rows, tf.int64),
        tf.constant([values[row] for row in rows], tf.float64),
    )


def selections(
    scores: RowScores, count: int, scale: float, runs: int, compiled: bool = False
) -> np.ndarray:
    select = functools.partial(select_top_rows, scores, count, scale)
    return rows_of_runs(select, runs, compiled)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("total", "values", "count"),
    [
        (6, {1: 2.0, 4: 0.5}, 2),
        (7, {}, 3),
        (5, {0: 1.0, 1: 2.0, 2: 0.0, 3: 1.5, 4: 1.0}, 2),
        (6, {0: 3.0, 5: 1.0}, 5),
        (4, {2: 1.0}, 1),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_set_of_rows_has_its_probability(
    total: int, values: dict[int, float], count: int, compiled: bool
) -> None:
    """Against the exact probability of each set, and for a wrong scale the test fails."""
    runs, scale = 20_000, 1.3
    found = collections.Counter(
        map(tuple, selections(scored(total, values), count, scale, runs, compiled).tolist())
    )
    sets = list(itertools.combinations(range(total), count))
    counts = [values.get(row, 0.0) for row in range(total)]
    observed = [found[rows] for rows in sets]
    assert sum(observed) == runs

    def p_value(scale: float) -> float:
        chances = [reference.gumbel_subset_probability(counts, rows, scale) for rows in sets]
        return float(stats.chisquare(observed, runs * np.array(chances)).pvalue)

    assert p_value(scale) > SIGNIFICANCE
    if any(values.values()):
        assert p_value(1.6 * scale) < SIGNIFICANCE


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_a_large_table_are_drawn_without_a_vector_of_its_size(compiled: bool) -> None:
    """Unscored rows come uniformly from 10⁹; scored ones win by their scores."""
    total, count = 10**9, 50
    scores = scored(total, {7: 1e6, 10**9 - 1: 1e6, 500: 0.0})
    found = selections(scores, count, 1.0, 200, compiled)
    assert found.shape == (200, count) and np.all(np.diff(found, axis=1) > 0)
    assert np.all(found[:, 0] <= 7) and np.all(found[:, -1] == 10**9 - 1)
    others = np.setdiff1d(found.ravel(), [7, 10**9 - 1])
    assert stats.kstest(others / total, "uniform").pvalue > SIGNIFICANCE


def test_all_rows_and_more() -> None:
    for count in (3, 9):
        np.testing.assert_array_equal(
            selections(scored(3, {1: 1.0}), count, 1.0, 2), [[0, 1, 2]] * 2
        )


@pytest.mark.cases(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("total", [40, 100_000])
def test_distinct_numbers_are_in_uniformly_random_order(total: int, compiled: bool) -> None:
    key = noise.NoiseKey()

    @tf.function
    def run(_: tf.Tensor) -> tf.Tensor:
        bounds, total_now = range(total, total + 1), tf.constant(total, tf.int64)
        draw = key.next_draw()
        distinct = functools.partial(exponential._distinct, draw, total_now, 30, bounds)
        return xla.compiled(distinct) if compiled else distinct()

    found = tf.map_fn(run, tf.zeros([1500]), fn_output_signature=tf.int64).numpy()
    assert all(len(set(row)) == 30 and row.min() >= 0 and row.max() < total for row in found)
    for place in (0, 15, 29):
        assert chi_square(found[:, place] * 40 // total, stats.randint(0, 40)) > SIGNIFICANCE


def test_rows_by_table() -> None:
    rows, offsets = tf.constant([0, 3, 5, 9, 10], tf.int64), np.array([0, 5, 5, 10, 12])
    parts = selected_by_table(rows, offsets)
    assert [part.numpy().tolist() for part in parts] == [[0, 3], [], [0, 4], [0]]
    filled = tf.function(lambda: xla.compiled(lambda: selected_by_table(rows, offsets)))()
    assert [part.numpy().tolist() for part in filled] == [
        [0, 3, 5, 5, 5],
        [],
        [0, 4, 5, 5, 5],
        [0, 2],
    ]


def test_compiled_scores_are_the_same() -> None:
    tables = lookups(np.random.default_rng(4), [9, 5], 6, [3, 1])
    plain = row_scores(tables, 0.7)

    @tf.function
    def compiled() -> tuple[tf.Tensor, tf.Tensor]:
        def scores() -> tuple[tf.Tensor, tf.Tensor]:
            found = row_scores(tables, 0.7)
            return found.row_ids, found.values

        return xla.compiled(scores)

    filled = RowScores(plain.offsets, *compiled())
    np.testing.assert_allclose(dense(filled), dense(plain), rtol=1e-12)
