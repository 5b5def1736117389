"""Running totals beside a training run, which its progress line and its report read."""

import tensorflow as tf

from dp_sparse.clipping import IsolationProgress
from dp_sparse.core import replicas


class StepDiagnostics:
    """Running totals of what no ε covers, and of the survivors.

    Untracked: never saved with a model.
    """

    def __init__(self) -> None:
        replicas.undistributed(self._create)

    def _create(self) -> None:
        self.steps = _total()  # taken since the optimizer was made
        self.examples = _total()
        self.clipped = _total()
        self.not_finite = _total()
        self.isolation = IsolationProgress()
        self.rows = tf.Variable([], shape=[None], dtype=tf.int64, trainable=False)

    def unnoised_variables(self) -> list[tf.Variable]:
        """All that follow from batches without noise, which the rows do not."""
        return [self.examples, self.clipped, self.not_finite, *self.isolation.variables()]

    def start(self, num_tables: int) -> None:
        """One total of rows for each table."""
        with tf.init_scope():
            self.rows.assign(tf.zeros([num_tables], tf.int64))

    def add(self, counts: tf.Tensor) -> None:
        """Adds a step's counts `[3]`: real examples, clipped ones, ones that were not finite."""
        self.steps.assign_add(1)
        totals = self.examples, self.clipped, self.not_finite
        for total, count in zip(totals, tf.unstack(tf.cast(counts, tf.int64)), strict=True):
            total.assign_add(count)


def _total() -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False)
