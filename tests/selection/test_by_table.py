"""Rows of all tables as rows of each: in a graph and by XLA as by hand."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse import noise
from dp_sparse.core import xla
from dp_sparse.selection import StepRows, TableLookups, contribution_map, step_rows_by_table
from dp_sparse.selection.threshold import Survivors, select_rows

WAYS = ("graph", "xla")


def selected(tables: list[TableLookups], way: str, seed: int) -> tuple[Survivors, list[StepRows]]:
    """A selection over all tables, and the same by table; traced."""
    key = noise.NoiseKey()
    key.replace(tf.constant([seed, 1], tf.int64))

    draw = key.next_draw()

    def found() -> tuple[list[tf.Tensor], list[tuple[tf.Tensor, tf.Tensor]]]:
        contributions = contribution_map(tables, 1.0)
        survivors = select_rows(contributions, 0.4, 0.5, draw)
        found_rows = step_rows_by_table(contributions, survivors)
        whole = [survivors.row_ids, survivors.places, survivors.starts, contributions.places]
        return whole, [(own.row_ids, own.places) for own in found_rows]

    whole, pairs = tf.function(lambda: xla.compiled(found) if way == "xla" else found())()
    return whole, [StepRows(*pair) for pair in pairs]


@pytest.mark.parametrize("way", WAYS)
def test_a_table_has_room_for_false_rows(way: str) -> None:
    """One example looks up one row of each table; noise alone chooses some 40 of the second."""
    tables = [
        TableLookups(n, tf.constant([[0]], tf.int64), tf.constant([[True]])) for n in (5, 400)
    ]
    (row_ids, _, starts, _), found = selected(tables, way, seed=3)
    chosen = row_ids.numpy()[int(starts[1]) : int(starts[2])] - 5
    assert len(chosen) > 20
    own = found[1].row_ids.numpy()
    np.testing.assert_array_equal(own[own < 400], chosen)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_rows_by_table(way: str, rows: list[int], size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    widths = [int(rng.integers(1, 3)) for _ in rows]
    ids = [rng.integers(0, n, (size, width)) for n, width in zip(rows, widths, strict=True)]
    valid = [rng.random(each.shape) < 0.7 for each in ids]
    tables = [
        TableLookups(n, tf.constant(own, tf.int64), tf.constant(there))
        for n, own, there in zip(rows, ids, valid, strict=True)
    ]
    whole, found_rows = selected(tables, way, seed)
    row_ids, places, _, positions = (each.numpy() for each in whole)
    offsets = np.concatenate([[0], np.cumsum(rows)])
    row_ids = row_ids[row_ids < offsets[-1]]
    place_of_lookup = np.split(places[positions], np.cumsum(widths)[:-1], axis=1)
    everything = zip(found_rows, rows, offsets[:-1], ids, place_of_lookup, strict=True)
    for own, num_rows, first, own_ids, global_places in everything:
        expected = row_ids[(row_ids >= first) & (row_ids < first + num_rows)] - first
        found = own.row_ids.numpy()
        assert np.all(found[len(expected) :] == num_rows)  # filler, which a graph has none of
        assert way == "xla" or len(found) == len(expected)
        np.testing.assert_array_equal(found[: len(expected)], expected)
        there = own.places.numpy() >= 0
        np.testing.assert_array_equal(there, global_places >= 0)
        np.testing.assert_array_equal(found[own.places.numpy()[there]], own_ids[there])
