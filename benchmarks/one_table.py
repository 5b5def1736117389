"""A model that is one embedding table, and steps on it: almost nothing else is timed."""

import itertools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

import dp_sparse

WIDTH, BATCH = 64, 1024
SIZES = {"1e5": 10**5, "1e6": 10**6, "1e7": 10**7}
RATE = 0.1
NAME = "table"

Make = Callable[[dp_sparse.PrivacyPlan], keras.optimizers.Optimizer]


def examples(vocabulary: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Zipf-like ids `[count, 1]` and targets `[count]`."""
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, count) - 1, vocabulary - 1)
    return ids[:, np.newaxis].astype(np.int64), rng.normal(size=count).astype(np.float32)


def private_step(
    vocabulary: int,
    batches: int,
    make: Make,
    mechanism: dp_sparse.GaussianMechanism | dp_sparse.ExponentialSelection | None = None,
    jit_compile: bool = False,
) -> Callable[[], object]:
    """One call is one private step on a fresh batch; it can be called `batches` times."""
    plan = _plan(batches, mechanism or dp_sparse.GaussianMechanism())
    dataset = tf.data.Dataset.from_tensor_slices(examples(vocabulary, BATCH * batches))
    return _step(vocabulary, make(plan), iter(list(plan.sampling.batches(dataset))), jit_compile)


def stock_step(vocabulary: int) -> Callable[[], object]:
    """One call is one step of stock Keras, without privacy, on one of three batches."""
    dataset = tf.data.Dataset.from_tensor_slices(examples(vocabulary, BATCH * 3)).batch(BATCH)
    return _step(vocabulary, keras.optimizers.SGD(RATE), itertools.cycle(list(dataset)))


def _step(
    vocabulary: int,
    optimizer: keras.optimizers.Optimizer,
    batches: Iterator[object],
    jit_compile: bool = False,
) -> Callable[[], object]:
    ids = keras.Input((1,), dtype="int64")
    rows = keras.layers.Embedding(vocabulary, WIDTH, name=NAME)(ids)
    model = keras.Model(ids, keras.ops.sum(rows, axis=2))
    model.compile(optimizer=optimizer, loss="mse", jit_compile=jit_compile)
    model.make_train_function()
    return lambda: model.train_function(iter([next(batches)]))


def _plan(
    batches: int, mechanism: dp_sparse.GaussianMechanism | dp_sparse.ExponentialSelection
) -> dp_sparse.PrivacyPlan:
    sampling = dp_sparse.StreamSampling(num_examples=BATCH * batches, batch_size=BATCH)
    budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1e-6)
    return dp_sparse.PrivacyPlan(budget, sampling, mechanism).calibrate()
