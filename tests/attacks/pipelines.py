"""Mixing before the model: in maps over batches, in sources, in how records are unpacked."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import dp_sparse
from tests.attacks.counting import EXAMPLES, Counter, one_hot, poisson, source
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.ways import WAYS, Way

_APART = tuple(way for way in WAYS if way != "graph")


def mapped(change: Callable[[Any], Any]) -> Callable[[Way], float]:
    """The sampler's batches with other features, row by row under the same marker."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        with counter.attacked():
            batches = counter.batches().map(lambda x, y, weights: (change(x), y, weights))
            counter.fit(batches, steps_per_epoch=2)
        return counter.sensitivity

    return attack


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
    ]
]
