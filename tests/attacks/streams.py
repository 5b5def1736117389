"""Streams whose passes give an example more often than the plan pays for."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import distribution
from tests.attacks.counting import EXAMPLES, Counter, one_hot, source, stream
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.ways import WAYS, Way

Change = Callable[[tf.data.Dataset], tf.data.Dataset]


def resumed(change: Change, way: Way, *, first: int) -> float:
    """`first` steps of a pass from a shuffled source, then the rest from the same source."""
    counter = Counter.on(way, stream(2))
    reads = change(source())
    counter.fit(counter.plan.sampling.batches(reads), steps_per_epoch=first)
    with counter.attacked():
        rest = counter.plan.sampling.batches(reads, first_step=first)
        counter.fit(rest, steps_per_epoch=4 - first)
    return counter.sensitivity


def reshuffled(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """In an order that is another at each reading, and reverses the one before."""
    turns = iter(range(1000))

    def generate() -> Any:
        x, y = one_hot()
        order = range(EXAMPLES) if next(turns) % 2 == 0 else reversed(range(EXAMPLES))
        for i in order:
            yield x[i], y[i]

    return tf.data.Dataset.from_generator(generate, output_signature=dataset.element_spec)


def resumed_in_mid_pass(way: Way) -> float:
    return resumed(reshuffled, way, first=2)


def resumed_in_order(way: Way) -> float:
    """Honest, and yet the source could be anything: it may be counted, not refused."""
    return resumed(lambda dataset: dataset, way, first=2)


def train_twice(way: Way) -> float:
    """`distribution.train` in mid-pass, twice."""
    counter = Counter.on(way, stream(2))
    reads = reshuffled(source())
    distribution.train(counter.model, reads, steps_per_epoch=2)
    with counter.attacked():
        distribution.train(counter.model, reads, steps_per_epoch=2)
    return counter.sensitivity


def repeated_and_shuffled(way: Way) -> float:
    """A source without end, in which an example may come twice in what is read as one pass."""
    counter = Counter.on(way, stream(2))
    with counter.attacked():
        endless = source().repeat().shuffle(40, seed=1)
        counter.fit(counter.plan.sampling.batches(endless))
    return counter.sensitivity


def stream_changed(change: Change) -> Callable[[Way], float]:
    def attack(way: Way) -> float:
        counter = Counter.on(way, stream(2))
        with counter.attacked():
            counter.fit(change(counter.batches()), steps_per_epoch=2)
        return counter.sensitivity

    return attack


def a_pass_too_short(way: Way) -> float:
    """A source of half of the examples would be read twice a pass."""
    counter = Counter.on(way, stream(2))
    short = source().take(EXAMPLES // 2)
    with counter.attacked():
        counter.fit(counter.plan.sampling.batches(short.repeat(1)), steps_per_epoch=2)
    return counter.sensitivity


def begun_again(way: Way) -> float:
    """A second pass that was not planned."""
    counter = Counter.on(way, stream(2))
    counter.fit(counter.batches())
    with counter.attacked():
        counter.fit(counter.batches(), steps_per_epoch=4)
    return counter.sensitivity


def three_passes(way: Way) -> float:
    """Each in another order."""
    counter = Counter.on(way, stream(2, passes=3))
    with counter.attacked():
        counter.fit(counter.plan.sampling.batches(reshuffled(source())))
    return counter.sensitivity


def random_source(way: Way) -> float:
    """As many numbers are drawn as an example is long: without it all later ones get others."""
    counter = Counter.on(way, stream(2))
    keras.utils.set_random_seed(42)

    def noisy(x: Any, y: Any) -> Any:
        return x + tf.pad(tf.random.normal([tf.argmax(x)]), [[0, EXAMPLES - tf.argmax(x)]]), y

    with counter.attacked():
        counter.fit(counter.plan.sampling.batches(source().map(noisy)), steps_per_epoch=2)
    return counter.sensitivity


def augmented(way: Way) -> float:
    """Honest: each example times a number of its own."""
    counter = Counter.on(way, stream(2))
    larger = lambda x, y, seed: (x * tf.random.stateless_uniform([], seed, 1.0, 2.0), y)  # noqa: E731
    counter.fit(counter.batches(augment=larger))
    return counter.sensitivity


APART = tuple(way for way in WAYS if "stream" not in way and "train" not in way)

ENTRIES = [
    Entry(f"stream: {name}", attack, expected, ways, apart=APART)
    for name, attack, expected, ways in [
        ("resumed in mid-pass, reshuffled", resumed_in_mid_pass, REFUSED_OR_MEASURED, ("stream",)),
        ("resumed in mid-pass, in order", resumed_in_order, REFUSED_OR_MEASURED, ("stream",)),
        ("train called twice in mid-pass", train_twice, REFUSED_OR_MEASURED, ("train",)),
        (
            "repeated without end and shuffled",
            repeated_and_shuffled,
            REFUSED_OR_MEASURED,
            ("stream",),
        ),
        ("a pass too short", a_pass_too_short, REFUSED, ("stream",)),
        ("batches left out", stream_changed(lambda b: b.skip(1)), REFUSED, ("stream",)),
        ("a batch repeated", stream_changed(lambda b: b.take(1).repeat(2)), REFUSED, ("stream",)),
        ("batches shuffled", stream_changed(lambda b: b.shuffle(4, seed=2)), REFUSED, ("stream",)),
        ("begun again", begun_again, REFUSED, ("stream",)),
        ("random numbers in a source", random_source, REFUSED, ("stream",)),
        ("honest: augment", augmented, MEASURED, ("stream",)),
        ("honest: three passes", three_passes, MEASURED, ("stream",)),
    ]
]
