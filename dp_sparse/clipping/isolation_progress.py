"""Which batches of a run the isolation checks have seen, and when the next check is due."""

from typing import Any

import tensorflow as tf

from dp_sparse.core import replicas, seldom

FIRST, _LATER, _APART = 3, 256, 8  # the first batches, then after 256, 2,048, … of them


class IsolationProgress:
    """Which batches of a run were checked, and of which tensors the checks saw something.

    Untracked: never saved with a model.
    """

    def __init__(self) -> None:
        self.batches, self.checks = (_count(), _count())  # that hold an example; by the schedule
        self._due_at = _count()  # how many batches come before the next check
        self._seen = tf.Variable([], shape=[None], dtype=tf.bool, trainable=False)
        self._some_unseen = tf.Variable(True, trainable=False)
        self._traced = False

    def variables(self) -> list[tf.Variable]:
        """All of them."""
        return [self.batches, self.checks, self._due_at, self._seen, self._some_unseen]

    def traced(self) -> None:
        """A step was traced; another one than the first may hold what no check has seen."""
        if self._traced:
            with tf.init_scope():
                self.restart()
        self._traced = True

    def restart(self) -> None:
        """Nothing was checked: the model was compiled, or its step traced, anew."""
        self._traced = False
        for count in (self.batches, self.checks, self._due_at):
            count.assign(0)
        self._seen.assign([])
        self._some_unseen.assign(True)

    def some_unseen(self) -> tf.Tensor:
        """Whether a tensor was 0 in all checks so far, as all were before the first."""
        return self._some_unseen.read_value()

    def scheduled(self) -> tf.Tensor:
        """Whether the next batch is to be checked whatever it holds."""
        return self.batches.read_value() >= self._due_at.read_value()

    def first_seen(self, not_zero: tf.Tensor) -> tf.Tensor:
        """Whether one of these, bool `[tensors]`, was 0 in all checks so far."""
        seen, no = self._seen.read_value(), tf.constant(False)
        waiting = self.some_unseen() & (self.checks.read_value() > 0)
        return tf.cond(waiting, seldom(lambda: tf.reduce_any(not_zero & ~seen)), lambda: no)

    def passed(self, there: Any, scheduled: Any, checked: Any, not_zero: Any) -> None:
        """Counts a batch of all replicas; each gives what it saw, bool."""
        if replicas.count() == 1:
            self._count_batch(there, scheduled, checked, not_zero)
        else:
            flags = tf.concat([tf.stack([there, scheduled, checked]), not_zero], 0)
            replicas.merged(self._count_of_all, tf.cast(flags, tf.int32))

    def _count_of_all(self, flags: Any) -> None:
        some = replicas.summed(flags) > 0
        self._count_batch(some[0], some[1], some[2], some[3:])

    def _count_batch(self, there: Any, scheduled: Any, checked: Any, not_zero: Any) -> None:
        def of_a_check() -> tf.Tensor:
            # Not by the size of what was seen: TensorFlow takes it for that of what is assigned.
            first = tf.equal(self.checks.read_value(), 0)
            checks = self.checks.assign_add(tf.cast(scheduled, tf.int64))
            later = _LATER * _APART ** tf.maximum(checks - FIRST, 0)
            self._due_at.assign(tf.where(checks < FIRST, tf.identity(checks), later))
            before = self._seen.read_value()
            seen = tf.cond(first, lambda: not_zero, lambda: before | not_zero)
            self._seen.assign(seen)
            self._some_unseen.assign(tf.reduce_any(~seen))
            return tf.constant(True)

        self.batches.assign_add(tf.cast(there, tf.int64))
        tf.cond(checked, seldom(of_a_check), lambda: tf.constant(False))


def _count() -> tf.Variable:
    return tf.Variable(0, dtype=tf.int64, trainable=False)
