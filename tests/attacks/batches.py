"""Batches that were used before, come out of order, or were made by nobody's sampler."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import dp_sparse
from tests.attacks.counting import EXAMPLES, Counter, one_hot, poisson, rare, source
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED, Entry, Expected
from tests.attacks.ways import SEVERAL, Way

Change = Callable[[tf.data.Dataset], tf.data.Dataset]


def changed(change: Change, steps: int = 2) -> Callable[[Way], float]:
    """One fit on the sampler's batches, changed on the way; q = 1, so a step is one use."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        with counter.attacked():
            counter.fit(change(counter.batches()), steps_per_epoch=steps)
        return counter.sensitivity

    return attack


def rows(change: Callable[[Any], Any]) -> Change:
    """Changes the rows of each batch and leaves the marker as it is."""

    def of_batch(x: Any, y: Any, weights: Any) -> Any:
        x, y, rest = change((x, y, {k: weights[k] for k in ("sample_weight", "present")}))
        return x, y, {**rest, "marker": weights["marker"]}

    return lambda batches: batches.map(of_batch)


def all_rows(change: Callable[[Any], Any]) -> Change:
    """Changes the rows of each batch and of its marker."""
    return lambda batches: batches.map(lambda *batch: tf.nest.map_structure(change, batch))


def negative_presence(batch: Any) -> Any:
    x, y, rest = batch
    return x, y, {**rest, "present": -rest["present"]}


def presence_of_three(batch: Any) -> Any:
    x, y, rest = batch
    return x, y, {**rest, "present": 3 * rest["present"]}


def negative_weights(batch: Any) -> Any:
    x, y, rest = batch
    return x, y, {**rest, "sample_weight": -rest["sample_weight"]}


def late(change: Change) -> Callable[[Way], float]:
    """Two honest steps, then the attack."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        counter.fit(counter.batches(), steps_per_epoch=2)
        with counter.attacked():
            counter.fit(change(counter.batches()), steps_per_epoch=1)
        return counter.sensitivity

    return attack


def chosen_anew_each_step(way: Way) -> float:
    """Of fresh passes takes the first batch with the first example: it is in each of them."""
    counter = Counter.on(way, rare())
    wanted = lambda x, y, weights: tf.reduce_any(x[:, 0] > 0)  # noqa: E731
    with counter.attacked():
        for _ in range(20):
            counter.fit(counter.batches().filter(wanted).take(1), steps_per_epoch=1)
    return counter.sensitivity


def the_second_of_a_pass(way: Way) -> float:
    """Drops the first batch of each pass: which one is dropped could rest on what is in it."""
    counter = Counter.on(way, poisson())
    with counter.attacked():
        counter.fit(counter.batches().skip(1), steps_per_epoch=1)
    return np.inf


def of_another_plan(way: Way) -> float:
    """Batches of a sampler with other fields."""
    counter, other = Counter.on(way, poisson()), poisson(steps=99)
    with counter.attacked():
        counter.fit(other.sampling.batches(one_hot()), steps_per_epoch=1)
    return np.inf


def of_a_seed(way: Way) -> float:
    counter = Counter.on(way, poisson())
    with counter.attacked():
        counter.fit(counter.plan.sampling.batches(one_hot(), seed=3), steps_per_epoch=1)
    return np.inf


def without_a_sampler(way: Way) -> float:
    counter = Counter.on(way, poisson())
    with counter.attacked():
        counter.fit(source().shuffle(8).batch(8))
    return np.inf


def of_an_earlier_process(way: Way) -> float:
    counter = Counter.on(way, poisson())
    older = tf.constant([0, 10**18, 0, 0], tf.int64)
    batches = counter.batches().map(lambda x, y, w: (x, y, {**w, "marker": w["marker"] - older}))
    with counter.attacked():
        counter.fit(batches, steps_per_epoch=1)
    return np.inf


def zipped(way: Way) -> float:
    """The marker of one pass with the rows of another: the first batch of it, ever again."""
    counter = Counter.on(way, poisson())
    batch = next(iter(counter.batches()))
    rows_of_one = tf.data.Dataset.from_tensors(batch).repeat()
    both = tf.data.Dataset.zip(rows_of_one, counter.batches())
    with counter.attacked():
        counter.fit(both, steps_per_epoch=1)
    return np.inf


def one_batch_kept(way: Way) -> float:
    """A cached pass is trained on again after another one."""
    counter = Counter.on(way, poisson())
    kept = counter.batches().take(2).cache()
    counter.fit(kept)
    counter.fit(counter.batches(), steps_per_epoch=1)
    with counter.attacked():
        counter.fit(kept)
    return np.inf


def two_fits_of_one_pass(way: Way) -> float:
    """Honest: each fit draws anew."""
    counter = Counter.on(way, poisson())
    with counter.attacked():
        for _ in range(3):
            counter.fit(counter.batches(), steps_per_epoch=2)
    return counter.sensitivity


def train_on_batch(way: Way) -> float:
    counter = Counter.on(way, poisson())
    x, y, weights = next(iter(counter.batches()))
    with counter.attacked():
        counter.model.train_on_batch(x, y, weights)
        counter.model.train_on_batch(x, y, weights)
    return np.inf


def two_models_of_one_batch(way: Way) -> float:
    """Two models of one plan train on the very same batches."""
    plan = poisson()
    counters = [Counter.on(way, plan) for _ in range(2)]
    cached = counters[0].batches().take(2).cache()
    counters[0].fit(cached)
    with counters[1].attacked():
        counters[1].fit(cached)
    return np.inf


def two_plans_of_one_pass(way: Way) -> float:
    """Two plans of equal numbers train on the very same batches; their ε would be added up."""
    counters = [Counter.on(way, poisson()) for _ in range(2)]
    cached = counters[0].batches().take(2).cache()
    counters[0].fit(cached)
    with counters[1].attacked():
        counters[1].fit(cached)
    return np.inf


def one_plan_in_two_threads(way: Way) -> float:
    """Two threads build optimizers of one plan at once, and each trains until it is refused."""
    plan, start = poisson(steps=4), threading.Barrier(2)

    def terms(_: int) -> float:
        start.wait()
        counter = Counter.on(way, plan)
        with contextlib.suppress(dp_sparse.PrivacyError):
            counter.fit(counter.batches())
        return float(np.abs(counter.terms).max())

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        return sum(threads.map(terms, range(2))) / 4


BATCHES = Expected(refusal=True, harmless=False, match="batch")
_STREAMS = ("stream", "train", "one_of_a_stream", "one_by_train", "one_a_replica_by_train")
APART = (
    *_STREAMS,
    "one",
    "one_eager",
    "one_xla",
)  # ways of loops and sizes that mean nothing here

CHANGES: dict[str, Change] = {
    "one batch again and again": lambda b: b.take(1).cache().repeat(),
    "batches shuffled": lambda b: b.take(6).shuffle(6, seed=1),
    "every other batch": lambda b: (
        b.enumerate().filter(lambda i, _: i % 2 == 0).map(lambda i, x: x)
    ),
    "the second batch first": lambda b: b.skip(1).take(1).concatenate(b.take(1)),
    "unbatched, shuffled, batched": lambda b: b.unbatch().shuffle(8, seed=1).batch(EXAMPLES),
    "two batches in one": lambda b: b.unbatch().batch(2 * EXAMPLES),
    "half batches": lambda b: b.unbatch().batch(EXAMPLES // 2),
    "examples filtered": lambda b: b.unbatch().filter(lambda x, y, w: x[0] < 1).batch(EXAMPLES),
    "a row of the batch doubled": all_rows(lambda leaf: tf.concat([leaf[:1], leaf[:-1]], 0)),
    "a row added to the batch": all_rows(lambda leaf: tf.concat([leaf[:1], leaf], 0)),
    "rows in another order": all_rows(lambda leaf: tf.reverse(leaf, [0])),
}
ROWS = {
    "presence below 0": rows(negative_presence),
    "presence of 3": rows(presence_of_three),
    "negative weights": rows(negative_weights),
}

ENTRIES = (
    [
        Entry(
            f"batches: {name}",
            changed(change),
            BATCHES,
            ("graph", "xla", "mirrored") if "again and" in name else ("graph",),
            apart=APART,
        )
        for name, change in CHANGES.items()
    ]
    + [
        Entry(f"batches: {name}", changed(change), REFUSED_OR_MEASURED, apart=APART)
        for name, change in ROWS.items()
    ]
    + [
        Entry(f"batches: {name}, after honest steps", late(CHANGES[name]), BATCHES, apart=APART)
        for name in ("the second batch first", "unbatched, shuffled, batched")
    ]
    + [
        Entry(f"batches: {name}", attack, expected, apart=APART)
        for name, attack, expected in [
            ("chosen anew at each step", chosen_anew_each_step, REFUSED_OR_MEASURED),
            ("the first of a pass left out", the_second_of_a_pass, BATCHES),
            ("of another plan", of_another_plan, BATCHES),
            ("made with a seed", of_a_seed, BATCHES),
            ("without a sampler", without_a_sampler, BATCHES),
            ("of an earlier process", of_an_earlier_process, BATCHES),
            ("a cached pass after another one", one_batch_kept, BATCHES),
            ("train_on_batch, twice", train_on_batch, BATCHES),
            ("one cached pass for two models", two_models_of_one_batch, BATCHES),
            ("one cached pass for two plans", two_plans_of_one_pass, BATCHES),
            ("honest: a pass for each fit", two_fits_of_one_pass, MEASURED),
        ]
    ]
    + [
        Entry(
            "one plan in two threads", one_plan_in_two_threads, MEASURED, apart=(*APART, *SEVERAL)
        )
    ]
    + [
        Entry(  # on several replicas Keras itself refuses two batches in one
            "batches: zipped with those of another pass", zipped, REFUSED, apart=(*APART, *SEVERAL)
        )
    ]
)
