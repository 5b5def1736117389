"""Book-keeping beside brute force: clipped sums and norms of one batch of a model, both ways.

Batches of random features and ids to compare them on are here, too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import UnsupportedLayerError, clipping
from dp_sparse.clipping.gradient_terms import Rows
from tests.reference import clipping as brute


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Sums in the order of the model's trainable variables, tables whole."""

    sums: list[np.ndarray]
    norms: np.ndarray
    finite: np.ndarray


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal entries, float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ids(*shape: int, rows: int = 6, seed: int = 0) -> np.ndarray:
    """Uniform over the rows of a table, int32."""
    return np.random.default_rng(seed).integers(0, rows, shape).astype(np.int32)


def square_loss(y: Any, prediction: Any, weight: Any = None) -> tf.Tensor:
    """Weighted mean square of each example, float32 `[batch]`; a list of outputs is summed."""
    if isinstance(prediction, list | tuple):
        return tf.add_n([square_loss(y, part, weight) for part in prediction])
    prediction = tf.cast(prediction, tf.float32)
    flat = tf.reshape(prediction, [tf.shape(prediction)[0], -1])
    columns = tf.range(tf.cast(tf.shape(flat)[1], tf.float32))
    target = y[:, tf.newaxis] * tf.cos(columns)[tf.newaxis]
    values = tf.reduce_mean(tf.square(flat - target), axis=1) * 10.0
    return values if weight is None else values * weight


def clipped(
    model: keras.Model,
    x: Any,
    y: np.ndarray,
    clip_norm: float,
    present: Sequence[float] | None = None,
    weights: np.ndarray | None = None,
) -> Clipped:
    """By book-keeping, eagerly, with every row of every table chosen."""
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    present = tf.ones(len(y)) if present is None else tf.constant(present, tf.float32)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        recording = clipping.record(model, x, tape, batch_capacity=len(tf.nest.flatten(x)[0]))
        losses = square_loss(y, recording.outputs, weights)
        total = tf.reduce_sum(losses)
    assert all(target.shape[0] == len(y) for target in recording.targets), "the batch must lead"
    terms = recording.terms(tape.gradient(total, recording.targets))
    num_rows, whole = {}, []
    for variable, term in terms:
        if isinstance(term, Rows):
            num_rows[id(variable)] = tf.constant(variable.shape[0])
            every = tf.range(variable.shape[0], dtype=tf.int64)
            term = term.restricted(tf.cast(term.row_ids, tf.int32), every)
        whole.append((variable, term))
    scaled = clipping.scaled(whole, clip_norm, losses, present)
    sums = scaled.dense_sums() | scaled.row_sums(num_rows)
    found = {key: total.numpy() for key, total in sums.items()}
    order = [found.get(id(v), np.zeros(v.shape, np.float32)) for v in model.trainable_variables]
    return Clipped(order, np.sqrt(scaled.squared_norms.numpy()), scaled.finite.numpy())


def refusal(model: keras.Model, *shape: int) -> str:
    """What is said of a model that cannot be clipped, on four examples of this shape."""
    with pytest.raises(UnsupportedLayerError) as caught:
        clipped(model, values(4, *shape), np.ones(4, np.float32), 1.0)
    return str(caught.value)


def brute_gradients(
    model: keras.Model, x: Any, y: np.ndarray, weights: np.ndarray | None = None
) -> list[list[np.ndarray]]:
    """Per-example gradients by a loop of tapes."""

    def loss_of(one_y: Any, prediction: Any, weight: Any) -> tf.Tensor:
        return tf.reduce_sum(square_loss(one_y, prediction, weight))

    return brute.example_gradients(model, loss_of, x, y, weights)


def assert_as_brute_force(
    model: keras.Model,
    x: Any,
    *,
    seed: int = 0,
    tolerance: float = 1e-5,
    weighted: bool = False,
    padding: int = 0,
) -> None:
    """Norms and clipped sums equal brute force, at a clip norm that binds for half of the examples.

    The tolerance is relative to the clip norm for the sums and to the largest norm for the norms.
    """
    size = len(tf.nest.flatten(x)[0])
    rng = np.random.default_rng(seed)
    y = rng.normal(size=size).astype(np.float32)
    weights = rng.uniform(0.2, 3, size).astype(np.float32) if weighted else None
    present = np.ones(size, np.float32)
    present[size - padding :] = 0
    gradients = brute_gradients(model, x, y, weights)
    norms = brute.norms(gradients)
    clip_norm = float(np.median(norms)) or 1.0
    result = clipped(model, x, y, clip_norm, present, weights)
    np.testing.assert_allclose(result.norms, norms, rtol=0, atol=tolerance * max(norms.max(), 1))
    expected = brute.clipped_sum(gradients, clip_norm, present)
    for variable, ours, theirs in zip(
        model.trainable_variables, result.sums, expected, strict=True
    ):
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=tolerance * max(clip_norm, 1) * size, err_msg=variable.path
        )
    assert result.finite.all()
