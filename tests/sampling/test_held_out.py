"""Held-out examples that are those of training are recognised, and others are not."""

import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import PoissonSampling, StreamSampling
from dp_sparse.sampling import trained_on

N = 8
X, Y = np.arange(4 * N, dtype=np.float32).reshape(2 * N, 2), np.ones(2 * N, np.float32)
POISSON = PoissonSampling(N, N, 2)


@pytest.mark.parametrize(
    ("held_out", "same"),
    [
        ((X, Y), True),
        ((X[:N], Y[:N].copy()), True),
        (({"a": X[2:4]}, None), True),
        ((X[N:], Y[N:]), False),
        ((X[:N].copy(), Y[:N].copy()), False),
        (None, False),
    ],
)
def test_arrays(held_out: object, same: bool) -> None:
    batches = POISSON.batches((X[:N], Y[:N]))
    assert trained_on(batches, held_out) == same
    assert trained_on(batches.map(lambda *batch: batch).prefetch(1), held_out) == same


def test_rows_between_those_of_training() -> None:
    batches = POISSON.batches((X[::2], Y[::2]))
    assert not trained_on(batches, (X[1::2], Y[1::2]))


def test_one_label_of_all_examples() -> None:
    ones = np.broadcast_to(np.float32(1), (2 * N,))
    batches = POISSON.batches((X[:N], ones[:N]))
    assert not trained_on(batches, (X[N:], ones[N:]))
    assert trained_on(batches, (X[:N], ones[:N]))


@pytest.mark.parametrize("sampling", [POISSON, StreamSampling(N, 2)])
def test_datasets(sampling: PoissonSampling | StreamSampling) -> None:
    whole = tf.data.Dataset.from_tensor_slices((X, Y))
    train, rest = whole.take(N), whole.skip(N)
    batches = sampling.batches(train)
    assert trained_on(batches, train.batch(4))
    assert not trained_on(batches, rest.batch(4))
