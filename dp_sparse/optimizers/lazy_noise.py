"""Noise of past steps that rows of tables still lack, and its arrival when they are read.

Under plain SGD the noise that DP-SGD adds to a row in steps s+1 … t is a sum of independent
normals, so one normal of variance V_t − V_s, with V_t = Σ (η·σ·C/B)² over the first t steps, is the
same (LazyDP, Lim et al. 2024). The running V is one number; a row keeps the V up to which it has
its noise, 8 bytes; both start again at 0 when all rows have theirs.

### Formal Guarantees
After `settle_all` the tables have the distribution that they have under DP-SGD with the same
steps; a row has it from `settle` on. V and what rows have of it are never saved: which rows lack
noise tells what batches looked up, and so does a table that still lacks noise.
DP-SGD rounds all rows at every step, this one a row when it is read, so noise must stand above what
is rounded away. Whether it does is judged by a bound on all weights that knows nothing of the
batches: the largest weight when all noise had arrived, which DP-SGD would have released, and the
most that each step since can have added. When that is too coarse, all rows are settled and measured
again; a step is refused only if that does not help.
Steps and readers in other threads exclude each other by `lock`: noise that a step adds to what is
due while another thread settles all rows would be forgotten.
Weights are released on a grid of the smallest deviation that any row can lack, public and the same
for all rows, so that the low bits of a weight near 0 do not tell which sum it came from.

A lock between steps, which write tables in graphs, and Python code that reads them.

A data pipeline and threads of the user's may read a model while `fit` trains it. Several readers
read at once. A step takes the lock when its batch is there and what it writes is computed, so a
reader that a data pipeline waits for never waits for the step that waits for this pipeline.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import PrivacyError, require

_NUMBERS = itertools.count()
_ENTRIES_AT_ONCE = 2**22  # of a table, when all its rows get their noise
_LARGEST_NORMAL = 9.2  # that `noise.normal` draws, rounded up
_UNITS = 2.0**-22  # of a weight, at least two in the last place of float32
_FINER = 2.0**-11  # than `noise.grid_step`: rounding a row once more must not tell that it was read


class TableLock:
    """One for all tables of an optimizer. A step that fails gives it back."""

    def __init__(self) -> None:
        name = f"dp_sparse_tables_{next(_NUMBERS)}"
        with tf.init_scope():
            self._mutex = tf.raw_ops.MutexV2(container="", shared_name=name)
        self._counting = threading.Lock()
        self._readers = 0
        self._held: tf.Tensor | None = None  # the mutex is free again when it is gone

    @contextlib.contextmanager
    def writing(self, after: Sequence[tf.Tensor | tf.Operation]) -> Iterator[None]:
        """Keeps readers and other writers out of what is traced inside.

        Args:
            after: What is computed before the lock is taken.
        """
        with tf.control_dependencies(after):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        with tf.control_dependencies([lock]):
            yield
        made = [op for op in graph.get_operations()[start:] if op.op_def.is_stateful]
        with tf.control_dependencies(made):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps writers out while the code inside runs, eagerly; other readers may come in."""
        with self._counting:
            if self._readers == 0:
                self._held = tf.raw_ops.MutexLock(mutex=self._mutex)
            self._readers += 1
        try:
            yield
        finally:
            with self._counting:
                self._readers -= 1
                if self._readers == 0:
                    self._held = None


class DelayedNoise:
    """The noise that rows of some tables lack; no trackable object, so no checkpoint sees it.

    Attributes:
        tables: The tables.
        lock: Held while a step writes, and while `settle_all` and readers after it run.
    """

    def __init__(self, tables: list[keras.Variable]) -> None:
        self.tables, self.lock = tables, TableLock()
        self._one_settles = threading.Lock()
        with tf.init_scope():
            self._variance = tf.Variable(0.0, trainable=False, dtype=tf.float64)
            self._largest = tf.Variable(np.inf, trainable=False, dtype=tf.float64)  # inf: unknown
            self._smallest = tf.Variable(np.inf, trainable=False, dtype=tf.float64)  # inf: no noise
            self._settled = {
                id(table): tf.Variable(tf.zeros([table.shape[0]], tf.float64), trainable=False)
                for table in tables
            }
        self._settle_range = [self._range_function(table) for table in tables]

    def room(self, deviation: tf.Tensor, change: tf.Tensor, key: noise.NoiseKey) -> tf.Tensor:
        """A check that float32 holds a step's noise beside any weight; settles all if it must.

        Args:
            deviation: Of the step's noise on each weight, float64 scalar.
            change: The most that the step adds to a weight beside noise, float64 scalar.
            key: For the noise that is due.

        Raises:
            PrivacyError: At run time, if it does not.
        """
        after = change + _LARGEST_NORMAL * deviation

        def fits(largest: tf.Tensor) -> tf.Tensor:
            return ((largest + after) * _UNITS <= deviation) | tf.equal(deviation, 0.0)

        known = self._largest.read_value()
        largest = tf.cond(fits(known), lambda: known, lambda: self._measured(key))
        check = require(
            fits(largest) | tf.math.is_nan(largest),
            PrivacyError,
            "The noise of a step, {} on each weight, is less than float32 can hold beside weights "
            "of up to {}, and what is rounded away would tell which rows were looked up. "
            "Raise the learning rate, or use DPSGDOptimizer.",
            deviation,
            largest + after,
        )
        with tf.control_dependencies([check]):
            return self._largest.assign(largest + after, read_value=True)

    def _measured(self, key: noise.NoiseKey) -> tf.Tensor:
        """Settles all rows, in a graph, and reads the largest weight. O(table entries)."""
        zero = tf.constant(0.0, tf.float64)
        return tf.reduce_max([zero, *(self._settled_largest(table, key) for table in self.tables)])

    def _settled_largest(self, table: keras.Variable, key: noise.NoiseKey) -> tf.Tensor:
        rows = tf.constant(table.shape[0], tf.int64)

        def part(start: tf.Tensor, largest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            stop = tf.minimum(start + _rows_at_once(table), rows)
            row_ids = tf.range(start, stop)

            def settle() -> tf.Tensor:
                self.settle(table, row_ids, key.next_draw(), noise.Purpose.DELAYED)
                return tf.constant(True)

            due = self._variance.read_value() > 0
            with tf.control_dependencies([tf.cond(due, settle, lambda: tf.constant(False))]):
                weights = tf.abs(table.value.sparse_read(row_ids))
            return stop, tf.maximum(largest, tf.cast(tf.reduce_max(weights), tf.float64))

        start = tf.constant(0, tf.int64), tf.constant(0.0, tf.float64)
        return tf.while_loop(lambda start, _: start < rows, part, start)[1]

    def refuse_vanishing(self, deviation: tf.Tensor) -> tf.Operation | None:
        """A check that `delay` can add noise of this deviation, float64 scalar, to its sum.

        Raises:
            PrivacyError: At run time, if it cannot.
        """
        before = self._variance.read_value()
        return require(
            (before + tf.square(deviation) > before) | tf.equal(deviation, 0.0),
            PrivacyError,
            "The noise of a step, {} on each weight, vanishes beside what rows lack already: "
            "the learning rate has dropped too far within one epoch. Use DPSGDOptimizer.",
            deviation,
        )

    def delay(self, deviation: tf.Tensor, given: list[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Every row lacks one normal of this deviation more, but those that were given theirs.

        Args:
            deviation: float64 scalar, which `refuse_vanishing` allows.
            given: For some tables the rows that have got all their noise, int64 `[rows]`.
        """
        variance = self._variance.assign_add(tf.square(deviation), read_value=True)
        self._smallest.assign(self._smaller(deviation))
        own = tf.square(deviation)  # another thread's step may have added its own meanwhile
        for table, row_ids in given:
            before = self._settled[id(table)].sparse_read(row_ids)
            values = tf.IndexedSlices(tf.minimum(before + own, variance), row_ids)
            self._settled[id(table)].scatter_update(values)

    def on_grid(self, values: tf.Tensor, deviation: tf.Tensor | float) -> tf.Tensor:
        """Weights as they are released, float32, rounded to 2⁻²⁰ of the smallest deviation or less.

        The sum of a weight and its noise is float64. Beside 0 float32 is finer than that sum, and
        some of its values could come from the weights of one data set alone.

        Args:
            values: Weights with their noise, float64.
            deviation: Of the step's noise on each weight, float64 scalar; infinite outside a step.
        """
        smallest = self._smaller(deviation)
        step = noise.grid_step(smallest) * _FINER
        rounded = tf.where(tf.math.is_finite(smallest), tf.round(values / step) * step, values)
        return tf.cast(rounded, tf.float32)

    def _smaller(self, deviation: tf.Tensor | float) -> tf.Tensor:
        """The smallest deviation of a step since all rows had their noise; one of 0 is none."""
        deviation = tf.convert_to_tensor(deviation, tf.float64)
        due = tf.where(deviation > 0, deviation, tf.constant(np.inf, tf.float64))
        return tf.minimum(self._smallest.read_value(), due)

    def settle(
        self, table: keras.Variable, row_ids: tf.Tensor, draw: noise.Draw, purpose: int
    ) -> None:
        """Adds the noise that some rows lack, `row_ids` int64 `[rows]`, unique; nothing to others.

        The sum is of a float64 normal and of weights that are not released.
        Other variables than the tables, such as those of a frozen layer, lack nothing.
        """
        if id(table) not in self._settled:
            return
        settled, variance = self._settled[id(table)], self._variance.read_value()
        deviations = tf.sqrt(tf.maximum(variance - settled.sparse_read(row_ids), 0.0))
        width = table.shape[1]
        normals = noise.normal(draw, purpose, tf.size(row_ids) * width)
        added = deviations[:, tf.newaxis] * tf.reshape(normals, [-1, width])
        values = tf.cast(table.value.sparse_read(row_ids), tf.float64) + added
        rows = tf.IndexedSlices(self.on_grid(values, np.inf), row_ids)
        with tf.control_dependencies([table.value.scatter_update(rows)]):
            self._mark_settled(table, row_ids, variance)

    def _mark_settled(self, table: keras.Variable, row_ids: tf.Tensor, at: tf.Tensor) -> None:
        values = tf.fill(tf.shape(row_ids), at)
        self._settled[id(table)].scatter_update(tf.IndexedSlices(values, row_ids))

    def settle_all(self, key: noise.NoiseKey) -> None:
        """Adds the noise that is due to every row; called eagerly, under `lock.reading`.

        O(table entries), a bounded part in memory at a time; nothing if nothing is due.
        """
        with self._one_settles:
            self._largest.assign(np.inf)  # who asked for it may change weights
            if float(self._variance.numpy()) == 0.0:
                return
            for table, settle_range in zip(self.tables, self._settle_range, strict=True):
                for start, stop in _parts(table):
                    settle_range(key, tf.constant(start, tf.int64), tf.constant(stop, tf.int64))
            self._start_again()

    def _start_again(self) -> None:
        """V and what rows have of it at 0; in an order that, if interrupted, only adds noise."""
        for table in self.tables:
            settled = self._settled[id(table)]
            for start, stop in _parts(table):
                settled[start:stop].assign(tf.zeros([stop - start], tf.float64))
        self._variance.assign(0.0)
        self._smallest.assign(np.inf)

    def _range_function(self, table: keras.Variable) -> Callable[..., None]:
        @tf.function(autograph=False)
        def settle_range(key: noise.NoiseKey, start: tf.Tensor, stop: tf.Tensor) -> None:
            self.settle(table, tf.range(start, stop), key.next_draw(), noise.Purpose.DELAYED)

        return settle_range


def _parts(table: keras.Variable) -> Iterator[tuple[int, int]]:
    """Ranges of rows, together all of the table's, each of a bounded number of entries."""
    rows, size = table.shape[0], _rows_at_once(table)
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def _rows_at_once(table: keras.Variable) -> int:
    return max(1, _ENTRIES_AT_ONCE // table.shape[1])
