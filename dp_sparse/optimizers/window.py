"""The contribution maps of a window of steps: their sum, and the rows that survive it.

Derived in docs/windowed_selection.md. A window adds up the maps of its steps. After its last step
the sum gets noise once and is thresholded; the rows that survive are those of all steps of the next
window. Windows have 1, 2, 4, ... steps, up to the longest one.

An example that joins at most one batch of a round (a step, or a pass over a stream) moves a sum
over n rounds as it moves n maps, so its noise is that of n maps, of deviation √n·σ1·C1.

The sum is kept as whole units of the rows that were looked up: rows in no order, each once, and the
maps since they were last merged, which take half as much room. Time O(lookups) a step, on average;
memory O(rows looked up in the window). Neither depends on the size of the tables.

### Formal Guarantees
The survivors of a window are a post-processing of the noisy maps of its steps, each released once.
The sum is in memory alone, belongs to one noise key, and is gone when its window ends: a new
process, a loaded file, another worker's key and the child of a fork begin a new window.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import places_of, rare_branch, replicas
from dp_sparse.selection import ContributionMap, Survivors, select_rows

_LEAST_ROOM = 2**12  # of maps that are not merged
_MOST_WINDOWS = 4096  # in the history
_ODD = 0x5851F42D4C957F2D  # of fingerprints
_STEPS, _ROUNDS, _LAST_ROUND, _MERGED, _FILLED = range(5)  # of a window's progress


@dataclasses.dataclass(frozen=True)
class Selection:
    """The rule by which rows survive; fixed for an optimizer.

    Attributes:
        offsets: First number of each table's rows, and the total at the end.
        unit: Of the maps.
        threshold: τ, for the map of one step.
        deviation: Of the noise of one map, σ1·C1.
        most_rows: The most rows of each table that may survive; None if that does not matter.
    """

    offsets: np.ndarray
    unit: float
    threshold: float
    deviation: float
    most_rows: tuple[int, ...] | None = None


class SelectionWindow:
    """One optimizer's sum of maps, and the survivors of its last window.

    Not trackable: checkpoints have none of it, and a copy begins a window of its own.

    Args:
        longest: W, the most steps of a window.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        replicas.undistributed(self._create)

    def _create(self) -> None:
        def integers(*shape: int | None) -> tf.Variable:
            nothing = tf.zeros([length or 0 for length in shape], tf.int64)
            return tf.Variable(nothing, shape=list(shape), trainable=False)

        with tf.device("CPU:0"):
            self._ended, self._progress, self._key = integers(), integers(5), integers(2)
            self._sum_ids, self._sum_units = integers(None), integers(None)
            self._new_ids, self._new_units = integers(None), integers(None)
            self._row_ids, self._starts = integers(None), integers(None)
            self._history = integers(None, 3)
        self._padded: list[tf.Variable] = []
        self._section = tf.CriticalSection()  # several threads may take steps

    def __deepcopy__(self, memo: dict[int, Any]) -> "SelectionWindow":
        return SelectionWindow(self.longest)

    def __reduce__(self) -> tuple[type["SelectionWindow"], tuple[int]]:
        return SelectionWindow, (self.longest,)

    @property
    def windows_ended(self) -> int:
        """How many windows have ended, in earlier processes, too."""
        return int(self._ended.numpy())

    @property
    def history(self) -> np.ndarray:
        """For each of the last 4,096 windows: steps, survivors, survivors that trained during it.

        Released. int64 `[windows, 3]`.
        """
        return self._history.numpy()

    def survivors(self, offsets: np.ndarray) -> list[np.ndarray]:
        """The rows of each table that now train, int64, sorted; released."""
        bounds, row_ids = self._starts.numpy(), self._row_ids.numpy()
        parts = zip(bounds[:-1], bounds[1:], offsets, strict=False)
        return [row_ids[begin:end] - first for begin, end, first in parts]

    def non_private_variables(self) -> list[tf.Variable]:
        """Variables that hold sums without noise."""
        return [self._progress, self._sum_ids, self._sum_units, self._new_ids, self._new_units]

    def start(self, survivors: list[np.ndarray], offsets: np.ndarray, ended: int = 0) -> None:
        """Begins a window with these rows of each table, after `ended` windows.

        Args:
            survivors: Of each table, sorted.
            offsets: First number of each table's rows, and the total at the end.
            ended: How many windows ended before.
        """
        firsts = zip(survivors, offsets, strict=False)
        numbers = np.concatenate([np.zeros(0, np.int64), *(own + first for own, first in firsts)])
        with tf.init_scope():
            self._ended.assign(ended)
            self._delete_sum()
            self._replace(tf.constant(numbers, tf.int64), offsets)

    def follow(
        self, ended: Sequence[int], survivors: list[np.ndarray], offsets: np.ndarray
    ) -> None:
        """Takes over what another window has released: `last_ended`, and its survivors."""
        self._append_history(*(tf.constant(number, tf.int64) for number in ended[1:]))
        self.start(survivors, offsets, ended[0])

    def last_ended(self) -> tf.Tensor:
        """How many windows have ended, and the last one's line in `history`: int64 `[4]`."""
        history = tf.concat([tf.zeros([1, 3], tf.int64), self._history.read_value()], 0)
        return tf.concat([self._ended.read_value()[tf.newaxis], history[-1]], 0)

    def fingerprint(self) -> tf.Tensor:
        """A hash of the number of windows that have ended and of the survivors; int64, a scalar."""
        row_ids = self._row_ids.read_value()
        squares = tf.reduce_sum((row_ids + 1) * (row_ids + 3) * _ODD)  # int64 wraps
        return squares + _ODD * tf.size(row_ids, tf.int64) + self._ended.read_value()

    def survivors_in(self, contributions: ContributionMap) -> Survivors:
        """The survivors, and where each row of a batch's map stands among them."""
        row_ids = self._row_ids.read_value()
        places = places_of(contributions.row_ids, row_ids)
        return Survivors(row_ids, places, self._starts.read_value())

    def padded_survivors(self, offsets: np.ndarray) -> list[tf.Tensor]:
        """For XLA: the survivors of each table, filled up with its number of rows."""
        if not self._padded:
            self._padded = replicas.undistributed(lambda: _nothing_padded(len(offsets) - 1))
            with tf.init_scope():
                self._replace(self._row_ids.read_value(), offsets)
        return [variable.read_value() for variable in self._padded]

    def add(
        self, row_ids: tf.Tensor, units: tf.Tensor, now: tf.Tensor, draw: noise.Draw, by: Selection
    ) -> None:
        """Adds the map of a step that is made, and ends the window if it was its last one.

        Several threads may call it: one adds after the other.

        Args:
            row_ids: int64 `[rows]`, each once.
            units: int64 `[rows]`.
            now: The number of the round of this step, an int64 scalar.
            draw: The streams of this step, of which selection has its own.
            by: How survivors are chosen.
        """
        self._section.execute(lambda: self._add(row_ids, units, now, draw, by))

    def _add(
        self, row_ids: tf.Tensor, units: tf.Tensor, now: tf.Tensor, draw: noise.Draw, by: Selection
    ) -> tf.Tensor:
        progress = self._own_progress(draw)
        filled, count = progress[_FILLED], tf.size(row_ids, tf.int64)
        fits = filled + count <= _size(self._new_ids)
        merged, filled = tf.cond(
            fits,
            lambda: (progress[_MERGED], tf.identity(filled)),
            rare_branch(lambda: self._merge(progress[_MERGED], filled, count)),
        )
        for variable, values in ((self._new_ids, row_ids), (self._new_units, units)):
            _write(variable, filled, values)
        steps = progress[_STEPS] + 1
        is_new = tf.cast(tf.not_equal(progress[_LAST_ROUND], now + 1), tf.int64)
        after = [steps, progress[_ROUNDS] + is_new, now + 1, merged, filled + count]
        self._progress.assign(tf.stack(after), read_value=False)
        ends = steps >= _length(self._ended.read_value(), self.longest)
        return tf.cond(
            ends, rare_branch(lambda: self._end(draw, by)), lambda: tf.constant(0, tf.int64)
        )

    def _own_progress(self, draw: noise.Draw) -> tf.Tensor:
        """The progress of the window under this key: none if another key began it."""
        key = tf.bitcast(tf.stack([draw.key[0], draw.offset]), tf.int64)
        is_same = tf.reduce_all(tf.equal(self._key.read_value(), key))
        self._key.assign(key, read_value=False)
        return tf.where(is_same, self._progress.read_value(), 0)

    def _merge(
        self, merged: tf.Tensor, filled: tf.Tensor, count: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds the new maps to the sum, and makes room for `count` rows and some steps more."""
        row_ids, units = self._sum_so_far(merged, filled)
        self._sum_ids.assign(row_ids, read_value=False)
        self._sum_units.assign(units, read_value=False)
        size = tf.size(row_ids, tf.int64)
        room = tf.maximum(tf.maximum(size // 2, _LEAST_ROOM), count)
        for variable in (self._new_ids, self._new_units):
            variable.assign(tf.zeros([room], tf.int64), read_value=False)
        return size, tf.zeros([], tf.int64)

    def _sum_so_far(self, merged: tf.Tensor, filled: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows of the window so far, each once, and their units."""
        ids = tf.concat([self._sum_ids[:merged], self._new_ids[:filled]], 0)
        units = tf.concat([self._sum_units[:merged], self._new_units[:filled]], 0)
        row_ids, places = tf.unique(ids)
        sums = tf.raw_ops.DenseBincount(input=places, size=tf.size(row_ids), weights=units)
        return row_ids, sums

    def _end(self, draw: noise.Draw, by: Selection) -> tf.Tensor:
        """Chooses the survivors, and deletes the sum."""
        progress = self._progress.read_value()
        row_ids, units = self._sum_so_far(progress[_MERGED], progress[_FILLED])
        rounds = tf.cast(progress[_ROUNDS], tf.float64)
        values = tf.cast(units, tf.float64) * (by.unit / tf.sqrt(rounds))
        whole = ContributionMap(by.offsets, row_ids, values, tf.zeros([0, 0], tf.int32), [])
        survivors = select_rows(whole, by.threshold, by.deviation, draw).row_ids
        if by.most_rows is not None:
            survivors = _at_most(survivors, by.offsets, by.most_rows, draw)
        kept = places_of(self._row_ids.read_value(), survivors) >= 0
        self._append_history(
            progress[_STEPS], tf.size(survivors, tf.int64), tf.math.count_nonzero(kept)
        )
        self._replace(survivors, by.offsets)
        self._delete_sum()
        self._ended.assign_add(1, read_value=False)
        return tf.constant(1, tf.int64)

    def _delete_sum(self) -> None:
        """Deletes the sum."""
        nothing = tf.zeros([0], tf.int64)
        for variable in (self._sum_ids, self._sum_units, self._new_ids, self._new_units):
            variable.assign(nothing, read_value=False)
        self._progress.assign(tf.zeros([5], tf.int64), read_value=False)

    def _append_history(self, *numbers: tf.Tensor) -> None:
        history = self._history.read_value()
        self._history.assign(tf.concat([history, [tf.stack(numbers)]], 0)[-_MOST_WINDOWS:])

    def _replace(self, row_ids: tf.Tensor, offsets: np.ndarray) -> None:
        """Other survivors, numbered through over the tables."""
        starts = tf.searchsorted(row_ids, tf.constant(offsets, tf.int64), out_type=tf.int64)
        self._row_ids.assign(row_ids, read_value=False)
        self._starts.assign(starts, read_value=False)
        for number, variable in enumerate(self._padded):
            own = row_ids[starts[number] : starts[number + 1]] - offsets[number]
            filler = int(offsets[number + 1] - offsets[number])
            variable.assign(_filled_up(own, filler, _size(variable)), read_value=False)


def _nothing_padded(num_tables: int) -> list[tf.Variable]:
    nothing = tf.zeros([0], tf.int64)
    return [tf.Variable(nothing, shape=[None], trainable=False) for _ in range(num_tables)]


def _size(variable: tf.Variable) -> tf.Tensor:
    """Without a reference to its values, which would have to be copied when some are written."""
    return tf.raw_ops.VariableShape(input=variable.handle, out_type=tf.int64)[0]


def _write(variable: tf.Variable, begin: tf.Tensor, values: tf.Tensor) -> None:
    """Writes values in place, from `begin` on."""
    end = begin + tf.size(values, tf.int64)
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle,
        begin=begin[tf.newaxis],
        end=end[tf.newaxis],
        strides=tf.ones([1], tf.int64),
        value=values,
    )


def _length(ended: tf.Tensor, longest: int) -> tf.Tensor:
    """Steps of the window after `ended` ones: 1, 2, 4, ... up to the longest."""
    doubled = tf.bitwise.left_shift(tf.constant(1, tf.int64), tf.minimum(ended, 31))
    return tf.minimum(doubled, longest)


def _at_most(
    row_ids: tf.Tensor, offsets: np.ndarray, most_rows: tuple[int, ...], draw: noise.Draw
) -> tf.Tensor:
    """The sorted rows; where a table has more than there is room for, some of them at random."""
    starts = tf.searchsorted(row_ids, tf.constant(offsets, tf.int64), out_type=tf.int64)
    table = tf.repeat(tf.range(len(most_rows), dtype=tf.int64), starts[1:] - starts[:-1])
    order = tf.argsort(noise.uniform(draw, noise.Purpose.PICKS, tf.size(row_ids)))
    order = tf.gather(order, tf.argsort(tf.gather(table, order), stable=True))
    by_table = tf.gather(table, order)
    rank = tf.range(tf.size(row_ids, tf.int64)) - tf.gather(starts, by_table)
    stay = rank < tf.gather(tf.constant(most_rows, tf.int64), by_table)
    return tf.sort(tf.gather(row_ids, tf.boolean_mask(order, stay)))


def _filled_up(row_ids: tf.Tensor, filler: int, least: tf.Tensor) -> tf.Tensor:
    """Up to a power of two, which never shrinks: XLA compiles a kernel for each size."""
    size = tf.size(row_ids, tf.int64)
    bits = tf.math.ceil(tf.math.log(tf.cast(tf.maximum(size, 8), tf.float64)) / np.log(2.0))
    room = tf.maximum(tf.maximum(tf.cast(2.0**bits, tf.int64), size), least)
    missing = tf.fill([room - size], tf.constant(filler, tf.int64))
    return tf.concat([row_ids, missing], 0)
