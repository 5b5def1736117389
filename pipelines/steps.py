"""What jobs share: batches without privacy, the time of a step, and how many steps count."""

import time
from collections.abc import Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf


def steps_taken(optimizer: keras.optimizers.Optimizer) -> int:
    """The steps of a run; of a private one those that ε covers, whose weights may be lost."""
    private = hasattr(optimizer, "steps_spent")
    return int((optimizer.steps_spent if private else optimizer.iterations).numpy())


class Rows(Protocol):
    """Examples that are read by their places."""

    def __len__(self) -> int:
        """How many there are."""

    def gather(self, indices: np.ndarray) -> Any:
        """x and y of those at `indices`."""


def stock_batches(training: Rows, batch_size: int, steps: int) -> tf.data.Dataset:
    """Shuffled batches of fixed size for the non-private run."""

    def generate() -> Iterator[Any]:
        rng = np.random.default_rng()
        while True:
            order = rng.permutation(len(training))
            for start in range(0, len(order) - batch_size + 1, batch_size):
                yield training.gather(np.sort(order[start : start + batch_size]))

    if len(training) < batch_size:
        raise ValueError(f"Expected at least one batch of {batch_size} rows, got {len(training)}.")
    example = training.gather(np.arange(batch_size))
    signature = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), example)
    return (
        tf.data.Dataset.from_generator(generate, output_signature=signature).take(steps).prefetch(2)
    )


class StepTimer(keras.callbacks.Callback):
    """Times each step, from when its batch is there until the weights are updated."""

    reads_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._begun)
