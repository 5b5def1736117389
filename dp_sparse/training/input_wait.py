"""How long training steps wait for their batches. It depends on the data, and no ε covers it."""

from typing import Any

import tensorflow as tf

from dp_sparse.core import replicas
from dp_sparse.sampling import own_map


class InputWait:
    """A clock on datasets, which adds up how long each of their elements was waited for.

    Attributes:
        used: Whether a dataset has it.
    """

    def __init__(self) -> None:
        self.used = False
        replicas.undistributed(self._create)

    def _create(self) -> None:
        self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def restart(self) -> None:
        """Begins anew with 0 seconds."""
        self._seconds.assign(0.0)

    def seconds(self) -> float:
        """Since the last start."""
        return float(self._seconds.numpy())

    def timed(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The same dataset; when asked for a batch, it reads the clock, asks, and reads again."""
        self.used = True
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would ask by itself, early
        asked = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: tf.timestamp())

        def arrived(asked: tf.Tensor, batch: Any) -> Any:
            self._seconds.assign_add(tf.maximum(tf.timestamp() - asked, 0))  # if it was set back
            return batch

        timed = own_map(tf.data.Dataset.zip(asked, batches).map(arrived))
        return timed.with_options(options)
