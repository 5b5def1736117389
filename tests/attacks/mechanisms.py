"""Mechanisms beside DP-AdaFEST: one example moves what they release by at most its clip norm."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from dp_sparse import (
    DPFESTOptimizer,
    DPSGDOptimizer,
    LazyDPSGDOptimizer,
    SelectedRows,
    ShuffledDPSGDOptimizer,
)
from tests.attacks.entries import MEASURED, MIXES, Entry
from tests.attacks.measuring import Problem
from tests.attacks.mixing_batch import FORWARD
from tests.attacks.towers import layer
from tests.attacks.ways import BATCHES_OF_ONE, SEVERAL, measured

ROWS = 40


def words(part: Any = None) -> Callable[[], keras.Model]:
    """Two lookups an example, hidden units that can be permuted, an attack between."""

    def model() -> keras.Model:
        ids = keras.Input((2,), dtype="int32")
        rows = keras.layers.Embedding(ROWS, 3, name="words")(ids)
        hidden = keras.layers.Dense(6, "tanh")(keras.layers.Flatten()(rows))
        hidden = hidden if part is None else layer(part)(hidden)
        return keras.Model(ids, keras.layers.Dense(1)(hidden))

    return model


def lookups() -> tuple[np.ndarray, np.ndarray]:
    """Seven examples share rows and agree; the second has rows of its own, and is against them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, (8, 2)).astype(np.int32)
    labels = 5 + rng.random((8, 1)).astype(np.float32)
    ids[1], labels[1] = (30, 31), -1e3
    return ids, labels


# Half of all rows, among them one of the second example's two.
_SELECTED = SelectedRows.public({"words": range(0, ROWS, 2)}, {"words": ROWS})
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "DP-SGD": {"make": DPSGDOptimizer},
    "DP-FEST": {"make": DPFESTOptimizer, "rows": _SELECTED},
    "DP-AdaFEST+": {"rows": _SELECTED},
    "a window": {"window": 4, "first_rows": _SELECTED},
    "a window of DP-AdaFEST+": {"window": 4, "rows": _SELECTED, "first_rows": _SELECTED},
    "LazyDP": {"make": LazyDPSGDOptimizer},
    "shuffled": {"make": ShuffledDPSGDOptimizer},
    "shuffled, the sum clipped": {"make": ShuffledDPSGDOptimizer, "batch_clip_norm": 0.6},
}
# What has code of its own: a step under XLA, and checks beside noise that comes late.
_OWN = {
    "honest": {"shuffled, the sum clipped": ("graph", "xla")},
    "the mean of the batch": dict.fromkeys(("LazyDP", "shuffled"), ("graph",)),
}
_APART = {  # what they refuse at once
    "LazyDP": (*SEVERAL, "microbatches", "one_a_part", "one_by_train"),
    "shuffled": SEVERAL,
    "shuffled, the sum clipped": SEVERAL,
}


def of(name: str, part: Any = None) -> Problem:
    """LazyDP wants noise that float32 holds beside a weight."""
    fields = {"sigma": 1e-4} if name == "LazyDP" else {}
    return Problem(words(part), lookups, removed=(0, 1), optimizer=OPTIMIZERS[name], **fields)


ENTRIES = [
    Entry(
        f"{name}: {what}",
        measured(of(name, part)),
        expected,
        _OWN[what].get(name, ("graph",) if part is None else ()),
        apart=(*_APART.get(name, ()), *(() if part is None else BATCHES_OF_ONE)),
    )
    for name in OPTIMIZERS
    for what, part, expected in [
        ("honest", None, MEASURED),
        ("the mean of the batch", FORWARD["mean"], MIXES),
    ]
]
