"""The rows of one table that a step may touch; of DP-SGD those that its batch looked up.

Rows that are numbered through over all tables are divided into the rows of each table.

In a graph all tables are divided at once, since operations on each of many would cost more than the
work; for XLA each gets the room of as many rows as there can be.

Lookups among rows selected beforehand: DP-FEST updates those, DP-AdaFEST+ chooses among them.

Inside a step the rows of a table are numbered by their place in its selection. A lookup of any
other row trains nothing.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dp_sparse.core import grouped, places_of, xla
from dp_sparse.selection.contribution import ContributionMap, TableLookups
from dp_sparse.selection.threshold import Survivors

_NOWHERE = 2**62  # beyond all rows


@dataclasses.dataclass(frozen=True)
class StepRows:
    """The rows of one table that a step may touch.

    Attributes:
        row_ids: int64 `[rows]`, unique and sorted; under XLA filled up with the table's number of
            rows.
        places: int32 `[batch, lookups]`: where in `row_ids` each lookup's row stands, -1 for a row
            not chosen.
    """

    row_ids: tf.Tensor
    places: tf.Tensor


@dataclasses.dataclass(frozen=True)
class StepChoice:
    """The rows of a step, and what a later choice needs of its batch.

    Attributes:
        rows: Of each table.
        to_remember: Nested tensors, without noise: for `PrivateOptimizer.remember` alone, once the
            step is made.
    """

    rows: list[StepRows]
    to_remember: tuple[tf.Tensor, ...] = ()


def looked_up_rows(table: TableLookups) -> StepRows:
    """All of them, sorted. O(lookups · log lookups)."""
    groups = grouped(tf.reshape(table.row_ids, [-1]), table.num_rows)
    row_ids, position = groups.values, groups.places
    order = tf.argsort(row_ids)
    places = tf.gather(tf.math.invert_permutation(order), position)
    return StepRows(tf.gather(row_ids, order), tf.reshape(places, tf.shape(table.row_ids)))


def with_public_rows(rows: StepRows, public_ids: tf.Tensor, lookups: TableLookups) -> StepRows:
    """The rows of a step and rows that belong to it whatever the batch holds, each once.

    Lookups of those count, too: their rows get noise in any case.

    Args:
        rows: Those that were chosen.
        public_ids: int64 `[public]`, drawn without the batch; repeated or not.
        lookups: Of the batch, in the table.
    """
    groups = grouped(tf.concat([rows.row_ids, public_ids], 0), lookups.num_rows)
    row_ids = tf.sort(groups.values)
    return StepRows(row_ids, restricted(lookups, row_ids).places)


def among_selected(public_ids: tf.Tensor, selected: tf.Tensor, num_rows: int) -> tf.Tensor:
    """Those of `public_ids` that are in `selected`; under XLA, where others stood, `num_rows`."""
    is_there = places_of(public_ids, selected) >= 0
    if xla.static_shapes():
        return tf.where(is_there, public_ids, num_rows)
    return tf.boolean_mask(public_ids, is_there)


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


@dataclasses.dataclass(frozen=True)
class Restricted:
    """One table's lookups among its selected rows.

    Attributes:
        num_rows: Rows of the whole table.
        selected: int64 `[k]`, sorted: the rows of the selection.
        places: int32 `[batch, lookups]`: where in `selected` each lookup's row stands, -1 if it
            does not.
        valid: bool `[batch, lookups]`: lookups of real examples in selected rows.
    """

    num_rows: int
    selected: tf.Tensor
    places: tf.Tensor
    valid: tf.Tensor

    @property
    def lookups(self) -> TableLookups:
        """The same as lookups in a table of k rows; k > 0."""
        row_ids = tf.cast(tf.maximum(self.places, 0), tf.int64)
        return TableLookups(self.selected.shape[0], row_ids, self.valid)


def restricted(lookups: TableLookups, selected: tf.Tensor) -> Restricted:
    """Finds each lookup's row among `selected`. O(lookups · log k)."""
    places = places_of(tf.reshape(lookups.row_ids, [-1]), selected)
    places = tf.reshape(places, tf.shape(lookups.row_ids))
    places = tf.ensure_shape(places, lookups.row_ids.shape)
    return Restricted(lookups.num_rows, selected, places, lookups.valid & (places >= 0))
