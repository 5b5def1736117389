"""Running totals beside a training run, which its progress line and its report read."""

import tensorflow as tf

from dp_sparse.core import replicas


class StepDiagnostics:
    """Running totals of what no ε covers, and of what was released.

    Untracked: never saved with a model. Totals that no ε covers are int64 scalars, read anew at
    each use.

    Attributes:
        rows: Rows that were noised, of each table, int64 `[tables]`.
        energies: `NoisyMeans.energies`, float64 `[variables]`.
        unclipped: The fraction of examples below the clip norm that each step released, summed over
            steps, float64 scalar; 0 where none is released.
    """

    def __init__(self) -> None:
        replicas.undistributed(self._create)

    def _create(self) -> None:
        self._totals = tf.Variable(tf.zeros([4], tf.int64), trainable=False)
        self.rows = tf.Variable([], shape=[None], dtype=tf.int64, trainable=False)
        self.energies = tf.Variable([], shape=[None], dtype=tf.float64, trainable=False)
        self.unclipped = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    @property
    def steps(self) -> tf.Tensor:
        """Steps taken since the optimizer was made."""
        return self._totals[0]

    @property
    def examples(self) -> tf.Tensor:
        """Real examples in their batches."""
        return self._totals[1]

    @property
    def clipped(self) -> tf.Tensor:
        """How many of them were clipped."""
        return self._totals[2]

    @property
    def not_finite(self) -> tf.Tensor:
        """How many of them were zeroed because they were not finite."""
        return self._totals[3]

    def non_private_variables(self) -> list[tf.Variable]:
        """All that follow from batches without noise; all others follow from what was released."""
        return [self._totals]

    def start(self, num_tables: int, num_variables: int) -> None:
        """One total of rows for each table, and one of energy for each measured variable."""
        with tf.init_scope():
            self.rows.assign(tf.zeros([num_tables], tf.int64))
            self.energies.assign(tf.zeros([num_variables], tf.float64))

    def add(self, counts: tf.Tensor) -> None:
        """Adds a step's counts `[3]`: real examples, clipped ones, ones that were not finite."""
        self._totals.assign_add(tf.concat([[1], tf.cast(counts, tf.int64)], 0))

    def add_released(self, energies: tf.Tensor, unclipped: tf.Tensor | None) -> None:
        """Adds what a step released; `unclipped` is `NoisyMeans.unclipped`."""
        self.energies.assign_add(energies)
        if unclipped is not None:
            self.unclipped.assign_add(0.5 + tf.cast(unclipped, tf.float64))
