"""The updates of tables off TPU, which are those that a TPU makes."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dp_sparse.optimizers import adagrad_rows, sgd_rows


class RowUpdates(tf.Module):
    """Updates tables off TPU as a TPU does: each row once, by the sum of its gradients.

    Args:
        optimizer: That of the tables: `tf.tpu.experimental.embedding.SGD` or `Adagrad`.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._slots: list[tf.Variable] = []  # Adagrad's, one for each table

    def apply(self, tables: Sequence[tf.Variable], gradients: Sequence[tf.IndexedSlices]) -> None:
        """Updates tables by their gradients, whose rows may repeat. O(rows · width)."""
        if isinstance(self._optimizer, tf.tpu.experimental.embedding.Adagrad) and not self._slots:
            with tf.init_scope():
                start = self._optimizer.initial_accumulator_value
                made = [tf.Variable(tf.fill(t.shape, start), trainable=False) for t in tables]
            self._slots.extend(made)
        rate = tf.cast(self._optimizer.learning_rate(), tf.float32)
        for index, (table, gradient) in enumerate(zip(tables, gradients, strict=True)):
            rows = _changed(summed_rows(gradient))
            if isinstance(self._optimizer, tf.tpu.experimental.embedding.SGD):
                sgd_rows(table, rows, rate)
            else:
                adagrad_rows(table, self._slots[index], rows, rate, epsilon=0.0)


def summed_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once, summed in float64."""
    rows, places = tf.unique(tf.reshape(tf.cast(gradient.indices, tf.int64), [-1]))
    values = tf.reshape(gradient.values, [-1, tf.shape(gradient.values)[-1]])
    sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), places, tf.size(rows))
    return tf.IndexedSlices(tf.cast(sums, tf.float32), rows, gradient.dense_shape)


def _changed(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The gradient without rows that are 0: writing a row would flush its denormal numbers."""
    there = tf.reduce_any(tf.not_equal(gradient.values, 0), axis=1)
    rows, values = (tf.boolean_mask(part, there) for part in (gradient.indices, gradient.values))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
