"""A lock between steps, which write tables in graphs, and Python code that reads them.

A data pipeline and threads of the user's may read a model while `fit` trains it. Several readers
read at once. A step takes the lock when its batch is there and what it writes is computed, so a
reader that a data pipeline waits for never waits for the step that waits for this pipeline.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

_NUMBERS = itertools.count()


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
