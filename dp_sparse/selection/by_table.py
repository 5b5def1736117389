"""Rows numbered through over all tables, as the rows of each table.

In a graph all tables are divided at once, since operations on each of many would cost more than the
work; for XLA each gets the room of as many rows as there can be.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dp_sparse.core import xla
from dp_sparse.selection.contribution import ContributionMap
from dp_sparse.selection.step_rows import StepRows
from dp_sparse.selection.threshold import Survivors

_NOWHERE = 2**62  # beyond all rows


def rows_by_table(
    row_ids: tf.Tensor, starts: tf.Tensor, offsets: np.ndarray, rooms: Sequence[int]
) -> list[tf.Tensor]:
    """Each table's rows under its own numbers, int64; under XLA filled up with its number of rows.

    Args:
        row_ids: int64 `[rows]`, sorted; what is beyond all rows is filler.
        starts: `[tables + 1]`: the rows of table t are `row_ids[starts[t]:starts[t + 1]]`.
        offsets: First number of each table, and the total at the end.
        rooms: Of each table, for XLA, the most rows that there can be.
    """
    if xla.static_shapes():
        return _rows_in_rooms(row_ids, starts, offsets, rooms)
    if len(rooms) == 1:
        return [row_ids]
    sizes = starts[1:] - starts[:-1]
    own = row_ids - tf.repeat(tf.constant(offsets[:-1], tf.int64), sizes)
    return tf.split(own, sizes, num=len(rooms))


def _rows_in_rooms(
    row_ids: tf.Tensor, starts: tf.Tensor, offsets: np.ndarray, rooms: Sequence[int]
) -> list[tf.Tensor]:
    filler = tf.fill([max(rooms)], tf.constant(_NOWHERE, tf.int64))
    padded, begins = tf.concat([row_ids, filler], 0), tf.cast(starts, tf.int32)
    parts = []
    for index, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        room = tf.range(min(end - first, rooms[index]))
        own = tf.gather(padded, begins[index] + room)  # XLA compiles a slice for each begin
        parts.append(tf.where(own < end, own - first, end - first))
    return parts


def step_rows_by_table(contributions: ContributionMap, survivors: Survivors) -> list[StepRows]:
    """The survivors of each table, and where each lookup's row stands among them."""
    widths, starts = contributions.widths, survivors.starts
    places = tf.gather(survivors.places, contributions.places)
    if xla.static_shapes():
        spare = survivors.row_ids.shape[0] - contributions.row_ids.shape[0]  # for false rows
        rooms = [places.shape[0] * width + spare for width in widths]
    else:
        rooms = [0] * len(widths)
    row_ids = rows_by_table(survivors.row_ids, starts, contributions.offsets, rooms)
    if len(widths) == 1:
        return [StepRows(row_ids[0], places)]
    within = places - _repeated(tf.cast(starts[:-1], tf.int32), widths)
    own_places = tf.split(tf.where(places >= 0, within, -1), widths, axis=1, num=len(widths))
    return [StepRows(*pair) for pair in zip(row_ids, own_places, strict=True)]


def _repeated(values: tf.Tensor, widths: Sequence[int | tf.Tensor]) -> tf.Tensor:
    """Each table's value as often as an example looks it up."""
    if all(isinstance(width, int) for width in widths):
        return tf.gather(values, np.repeat(np.arange(len(widths)), widths))
    return tf.repeat(values, widths)
