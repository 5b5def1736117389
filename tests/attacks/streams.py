"""Streams whose passes give an example more often than the plan pays for."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dp_sparse import distribution
from tests.attacks.counting import EXAMPLES, Counter, one_hot, source, stream
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.roads import ROADS, Road

Change = Callable[[tf.data.Dataset], tf.data.Dataset]


def resumed(change: Change, road: Road, *, first: int) -> float:
    """`first` steps of a pass from a shuffled source, then the rest from the same source."""
    counter = Counter.on(road, stream(2))
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


def resumed_in_mid_pass(road: Road) -> float:
    return resumed(reshuffled, road, first=2)


def resumed_in_order(road: Road) -> float:
    """Honest, and yet the source could be anything: it may be counted, not refused."""
    return resumed(lambda dataset: dataset, road, first=2)


def train_twice(road: Road) -> float:
    """`distribution.train` in mid-pass, twice."""
    counter = Counter.on(road, stream(2))
    reads = reshuffled(source())
    distribution.train(counter.model, reads, steps_per_epoch=2)
    with counter.attacked():
        distribution.train(counter.model, reads, steps_per_epoch=2)
    return counter.sensitivity


def repeated_and_shuffled(road: Road) -> float:
    """A source without end, in which an example may come twice in what is read as one pass."""
    counter = Counter.on(road, stream(2))
    with counter.attacked():
        endless = source().repeat().shuffle(40, seed=1)
        counter.fit(counter.plan.sampling.batches(endless))
    return counter.sensitivity


def stream_changed(change: Change) -> Callable[[Road], float]:
    def attack(road: Road) -> float:
        counter = Counter.on(road, stream(2))
        with counter.attacked():
            counter.fit(change(counter.batches()), steps_per_epoch=2)
        return counter.sensitivity

    return attack


def a_pass_too_short(road: Road) -> float:
    """A source of half of the examples would be read twice a pass."""
    counter = Counter.on(road, stream(2))
    short = source().take(EXAMPLES // 2)
    with counter.attacked():
        counter.fit(counter.plan.sampling.batches(short.repeat(1)), steps_per_epoch=2)
    return counter.sensitivity


def begun_again(road: Road) -> float:
    """A second pass that was not planned."""
    counter = Counter.on(road, stream(2))
    counter.fit(counter.batches())
    with counter.attacked():
        counter.fit(counter.batches(), steps_per_epoch=4)
    return counter.sensitivity


def three_passes(road: Road) -> float:
    """Each in another order."""
    counter = Counter.on(road, stream(2, passes=3))
    with counter.attacked():
        counter.fit(counter.plan.sampling.batches(reshuffled(source())))
    return counter.sensitivity


APART = tuple(road for road in ROADS if "stream" not in road and "train" not in road)

ENTRIES = [
    Entry(f"stream: {name}", attack, expected, roads, apart=APART)
    for name, attack, expected, roads in [
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
        ("honest: three passes", three_passes, MEASURED, ("stream",)),
    ]
]
