"""Mixing, and random numbers that can be predicted, before the model sees a batch.

In maps over batches, in sources, in how records are unpacked.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from dp_sparse import offline
from tests.attacks.counting import EXAMPLES, Counter, one_hot, poisson, source
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.ways import WAYS, Way

_APART = tuple(way for way in WAYS if way != "graph")
_RANDOM = REFUSED.matching("random numbers")


def mapped(change: Callable[[Any], Any]) -> Callable[[Way], float]:
    """The sampler's batches with other features, row by row under the same marker."""

    return changed(lambda made: made.map(lambda x, y, weights: (change(x), y, weights)))


def changed(change: Callable[[tf.data.Dataset], tf.data.Dataset]) -> Callable[[Way], float]:
    """Another dataset of the sampler's batches, in a program whose first line sets all seeds."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        keras.utils.set_random_seed(42)
        with counter.attacked():
            counter.fit(change(counter.batches()), steps_per_epoch=2)
        return counter.sensitivity

    return attack


def augmented(way: Way) -> float:
    """Each example times a number of its own; its gradient is clipped to C all the same."""
    counter = Counter.on(way, poisson())

    def larger(x: Any, y: Any, seed: Any) -> Any:
        return x * tf.random.stateless_uniform([], seed, 1.0, 2.0), y

    keras.utils.set_random_seed(42)
    counter.fit(counter.batches(augment=larger), steps_per_epoch=3)
    return counter.sensitivity


def from_source(make: Callable[[], Any]) -> Callable[[Way], float]:
    """The sampler's own batches, of a source that is more than it seems."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        with counter.attacked():
            counter.fit(counter.plan.sampling.batches(make()), steps_per_epoch=3)
        return counter.sensitivity

    return attack


def from_records(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Way], float]:
    """A file of records, which `change` turns into features a batch at a time."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        kind = np.dtype([("x", np.float32, EXAMPLES), ("y", np.float32, 1)])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "records"
            records = np.zeros(EXAMPLES, kind)
            records["x"], records["y"] = one_hot()
            records.tofile(path)
            file = dp_sparse.RecordFile(path, kind, lambda r: (change(r["x"]), r["y"]))
            with counter.attacked():
                counter.fit(counter.plan.sampling.batches(file), steps_per_epoch=2)
        return counter.sensitivity

    return attack


def unpacked_before(change: Callable[[Any], Any]) -> Callable[[Way], float]:
    """Batches drawn before training, whose records `unpack` changes a batch at a time."""

    def attack(way: Way) -> float:
        kind = np.dtype([("x", np.float32, EXAMPLES), ("y", np.float32, 1)])
        records = np.zeros(EXAMPLES, kind)
        records["x"], records["y"] = one_hot()
        steps = np.repeat(np.arange(4), EXAMPLES)
        with tempfile.TemporaryDirectory() as folder:
            key = offline.new_key()
            manifest = offline.Manifest(
                draw_id=offline.draw_id(key),
                num_examples=EXAMPLES,
                expected_batch_size=EXAMPLES,
                steps=4,
                capacity=EXAMPLES,
                record=kind.descr,
                bucket_steps=4,
                stripes=1,
            )
            offline.write_bucket(folder, manifest, 0, steps, np.tile(records, 4))
            manifest.write(folder)
            source = dp_sparse.OfflineBatches(folder, lambda r: (change(r["x"]), r["y"]))
            plan = dp_sparse.offline_sampling(source, shared=True)
            counter = Counter.on(way, dataclasses.replace(poisson(), sampling=plan))
            with counter.attacked():
                counter.fit(counter.plan.sampling.batches(source), steps_per_epoch=2)
        return counter.sensitivity

    return attack


class Gathered:
    """A source that changes what it gathers."""

    def __init__(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self._change = change

    def __len__(self) -> int:
        return EXAMPLES

    def gather(self, indices: np.ndarray) -> Any:
        x, y = one_hot()
        return self._change(x[indices]), y[indices]


def scaled(x: np.ndarray) -> np.ndarray:
    """Each row times a number of NumPy's own: two rows never have the same."""
    return x * np.random.normal(size=(len(x), 1)).astype(np.float32)


def noisy(x: Any) -> Any:
    return x + tf.random.normal(tf.shape(x))


def flipped(x: Any) -> Any:
    """By the global seed, as a map over images has it."""
    return tf.image.random_flip_left_right(x[:, None, :, None])[:, 0, :, 0]


def by_a_layer(made: tf.data.Dataset) -> tf.data.Dataset:
    flip = keras.layers.RandomFlip("horizontal", seed=3)
    return made.map(lambda x, y, w: (flip(x[:, None, :, None], training=True)[:, 0, :, 0], y, w))


def by_a_counter(made: tf.data.Dataset) -> tf.data.Dataset:
    """As TensorFlow's tutorial on augmentation has it."""
    both = tf.data.Dataset.zip(made, tf.data.Dataset.counter(dtype=tf.int32))
    return both.map(
        lambda batch, i: (
            batch[0] + tf.random.stateless_normal([EXAMPLES, EXAMPLES], [i, i]),
            *batch[1:],
        )
    )


def jittered(x: Any, y: Any) -> Any:
    return noisy(x), y


def run_together(x: np.ndarray) -> np.ndarray:
    """Twice as many rows, each half an example: behind a removed one all others move."""
    return np.tile(x.reshape(-1, EXAMPLES // 2), 2)


ENTRIES = [
    Entry(f"pipeline: {name}", attack, expected, apart=_APART)
    for name, attack, expected in [
        ("honest: each example scaled by a map", mapped(lambda x: 2 * x), MEASURED),
        ("honest: a dataset", from_source(source), MEASURED),
        ("a dataset that shuffles", from_source(lambda: source().shuffle(8)), REFUSED_OR_MEASURED),
        ("honest: records", from_records(lambda x: 2 * x), MEASURED),
        ("records, their rows run together", from_records(run_together), REFUSED),
        ("records, each as two examples", from_records(lambda x: np.repeat(x, 2, 0)), REFUSED),
        ("honest: augment", augmented, MEASURED),
        ("tf.random in a map", mapped(noisy), _RANDOM),
        ("a flip in a map", mapped(flipped), _RANDOM),
        ("a random layer in a map", changed(by_a_layer), _RANDOM),
        ("a counter as a seed", changed(by_a_counter), _RANDOM),
        (
            "a seed of constants",
            mapped(lambda x: x * tf.random.stateless_uniform([EXAMPLES, 1], [1, 2])),
            _RANDOM,
        ),
        ("NumPy's numbers in a map", mapped(lambda x: x * scaled(np.ones((EXAMPLES, 1)))), _RANDOM),
        (
            "Python in a map",
            mapped(lambda x: tf.ensure_shape(tf.numpy_function(scaled, [x], tf.float32), x.shape)),
            _RANDOM,
        ),
        ("MixUp in a map", mapped(lambda x: (x + tf.reverse(x, [0])) / 2), REFUSED),
        ("a dataset whose map is random", from_source(lambda: source().map(jittered)), _RANDOM),
        ("NumPy's numbers in unpack", from_records(scaled), _RANDOM),
        ("NumPy's numbers in gather", from_source(lambda: Gathered(scaled)), _RANDOM),
        ("MixUp in unpack", from_records(lambda x: (x + x[::-1]) / 2), REFUSED),
        ("one example for all", from_records(lambda x: np.repeat(x[:1], len(x), 0)), REFUSED),
        ("drawn before, random in unpack", unpacked_before(noisy), _RANDOM),
        ("drawn before, MixUp", unpacked_before(lambda x: (x + tf.reverse(x, [0])) / 2), REFUSED),
        ("honest: drawn before", unpacked_before(lambda x: 2 * x), MEASURED),
    ]
]
