"""Passes over a `tf.data.Dataset`, which may have another order each time that it is read.

A pass reads the dataset once, and the dataset must end with its last example. The marker of each
batch names the iterator that made it, so parts of two readings cannot be joined to one pass.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError, require
from dp_sparse.sampling import held_out, input_guard, marker, padding
from dp_sparse.sampling.base import Sampling
from dp_sparse.sampling.batch import is_sampled
from dp_sparse.sampling.data_source import batch_hint, refuse_ragged, unpacked


def batches(source: tf.data.Dataset, sampling: Sampling, first_step: int) -> tf.data.Dataset:
    """The batches from `first_step` on, each `[capacity, ...]`; `first_step` begins a pass.

    Raises:
        ValueError: The examples have no fixed shape, or their number is not the sampler's.
        PrivacyError: While iterating, when a pass has more or fewer examples than expected.
    """
    _check(source, sampling.num_examples)
    input_guard.check_source(source)
    assert sampling.steps_per_pass is not None
    size, steps = sampling.batch_capacity, sampling.steps - first_step
    one_pass = source.take(sampling.num_examples + 1).map(_weighted).batch(size)
    nothing = _empty_like(one_pass.element_spec)
    endless = one_pass.concatenate(tf.data.Dataset.from_tensors(nothing).repeat())
    pairs = _with_next_size(endless.take(sampling.steps_per_pass + 1), nothing)
    checked = pairs.enumerate().map(lambda *args: _whole(sampling, batch_hint(source), *args))
    run = checked.repeat(steps // sampling.steps_per_pass).enumerate(first_step)
    run = tf.data.Dataset.zip(run, _nonce_of_iterator())
    run = run.map(lambda batch, nonce: _marked(sampling, batch[0], batch[1], nonce))
    run = run.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
    return held_out.remember(input_guard.own(run), source)


def _check(source: tf.data.Dataset, num_examples: int) -> None:
    if is_sampled(source.element_spec):
        raise ValueError(
            "Expected examples, got batches of a sampler: pass what sampling.batches(...) was "
            "given."
        )
    refuse_ragged(source.element_spec)
    cardinality = int(source.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"Expected a data source that ends after num_examples={num_examples} examples, got one "
            "without end: it would give examples more than once in a pass. Leave repeat() out; "
            "passes= says how often the dataset is read."
        )
    if cardinality not in (tf.data.UNKNOWN_CARDINALITY, num_examples):
        raise ValueError(
            f"Expected a data source of num_examples={num_examples} examples, got {cardinality}: a "
            "pass has each example once. Give the true number, or cut the dataset by take(...)."
            f"{batch_hint(source)}"
        )
    for leaf in tf.nest.flatten(source.element_spec):
        if not leaf.shape.is_fully_defined():
            raise ValueError(
                f"Expected examples of one known shape, got a part of shape {leaf.shape}: pad it, "
                f"and say its shape by tf.ensure_shape.{batch_hint(source)}"
            )


def _with_next_size(dataset: tf.data.Dataset, nothing: Any) -> tf.data.Dataset:
    """Each batch but the last one, with the size of the batch that follows it."""

    def step(before: Any, batch: Any) -> Any:
        return batch, (before, _size(batch))

    return dataset.scan(nothing, step).skip(1)


def _whole(sampling: Sampling, hint: str, index: tf.Tensor, pair: Any) -> Any:
    """The batch; fails if a pass ends early, or does not end.

    Repeating such a pass, or reading on, would use examples more often than the plan pays for.
    """
    batch, next_size = pair
    assert sampling.steps_per_pass is not None
    total, capacity = sampling.num_examples, tf.constant(sampling.batch_capacity, tf.int64)
    expected = tf.minimum(capacity, total - index * capacity)
    last = tf.equal(index, sampling.steps_per_pass - 1)
    size = _size(batch) + tf.where(last, next_size, 0)
    message = (
        f"Expected num_examples={total} examples in each pass of the stream, but batch {{}} "
        f"holds {{}}.{hint}"
    )
    longer = (
        f"Expected the stream to end after num_examples={total} examples, got more: a dataset that "
        "repeats examples would use them more often than the plan pays for. If it gives each once, "
        f"cut it by take(...).{hint}"
    )
    checks = [
        require(size <= expected, PrivacyError, longer),
        require(size >= expected, PrivacyError, message, index, size),
    ]
    with tf.control_dependencies(checks):
        return tf.nest.map_structure(tf.identity, batch)


def _nonce_of_iterator() -> tf.data.Dataset:
    """The same number without end; each iterator has a number of its own."""

    def draw() -> Iterator[int]:
        yield marker.new_nonce(None)

    drawn = tf.data.Dataset.from_generator(draw, output_signature=tf.TensorSpec([], tf.int64))
    return drawn.flat_map(lambda nonce: tf.data.Dataset.from_tensors(nonce).repeat())


def _marked(sampling: Sampling, index: tf.Tensor, batch: Any, nonce: tf.Tensor) -> Any:
    x, y, weights = batch
    count, capacity = tf.cast(_size(batch), tf.int32), sampling.batch_capacity

    def pad(leaf: tf.Tensor) -> tf.Tensor:
        widths = [[0, capacity - count]] + [[0, 0]] * (leaf.shape.rank - 1)
        return tf.ensure_shape(tf.pad(leaf, widths), [capacity, *leaf.shape[1:]])

    checks = [padding.weight_check(weight, index) for weight in tf.nest.flatten(weights)]
    with tf.control_dependencies(checks):
        x, y, weights = tf.nest.map_structure(pad, (x, y, weights))
    present = tf.cast(tf.range(capacity) < count, tf.float32)
    numbers = tf.constant(marker.Marker(sampling.fingerprint, 0, 0).of_examples(capacity))
    mark = numbers + tf.stack([[0, nonce, index, 0]])
    return x, y, {"sample_weight": weights, "present": present, "marker": mark}


def _size(batch: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]


def _weighted(*example: Any) -> tuple[Any, Any, Any]:
    x, y, weight = unpacked(example)
    weight = tf.constant(1.0) if weight is None else weight
    return x, y, tf.nest.map_structure(lambda value: tf.cast(value, tf.float32), weight)


def _empty_like(spec: Any) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros([0, *s.shape[1:]], s.dtype), spec)
