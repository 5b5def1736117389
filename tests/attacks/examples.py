"""Odd examples: not finite, huge, tiny, out of range, weightless, all padding."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import dp_sparse
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.measuring import Problem
from tests.attacks.towers import numbers, tower
from tests.attacks.ways import measured

ALL = ("graph", "xla", "microbatches", "mirrored", "stream")
ROWS, LOOKUPS = 12, 5
_EVERYWHERE = ("a feature that is NaN", "ids in three tables")
_SECOND = (1,)  # the odd one


def with_odd(value: Any, where: str = "x") -> Callable[[], Any]:
    """Numbers whose second example has `value` in its first feature, its label or its weight."""

    def data() -> Any:
        x, y = numbers(outlier=1.0)()
        weights = np.ones(len(x), np.float32)
        {"x": x, "y": y, "weight": weights[:, None]}[where][1, 0] = value
        return x, y, weights

    return data


def features(value: Any, **fields: Any) -> Problem:
    return Problem(tower(), with_odd(value), removed=_SECOND, **fields)


def label(value: Any, **fields: Any) -> Problem:
    return Problem(tower(), with_odd(value, "y"), removed=_SECOND, **fields)


def weighted(value: Any, **fields: Any) -> Problem:
    return Problem(tower(), with_odd(value, "weight"), removed=(1, 0), **fields)


def bag(mask_zero: bool = False, dtype: str = "int32") -> Callable[[], keras.Model]:
    def model() -> keras.Model:
        ids = keras.Input((LOOKUPS,), dtype=dtype)
        table = keras.layers.Embedding(ROWS, 3, mask_zero=mask_zero, embeddings_initializer="ones")
        pooled = keras.layers.GlobalAveragePooling1D()(table(ids))
        return keras.Model(ids, keras.layers.Dense(1)(pooled))

    return model


def two_tables() -> keras.Model:
    """Two tables and one more that shares the first's ids: the map is joint."""
    ids = keras.Input((LOOKUPS,), dtype="int32")
    tables = [keras.layers.Embedding(ROWS, 2, embeddings_initializer="ones") for _ in range(3)]
    values = [keras.layers.Flatten()(table(ids)) for table in tables]
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(values)))


def ids(second: list[float], dtype: str = "int32") -> Callable[[], Any]:
    """Ids, of which the second example has `second`."""

    def data() -> Any:
        found = (np.arange(8 * LOOKUPS).reshape(8, LOOKUPS) % (ROWS - 1)) + 1
        found = found.astype(dtype)
        found[1] = second
        return found, np.full((8, 1), 7, np.float32)

    return data


def lookups(second: list[float], model: Any = None, dtype: str = "int32", **fields: Any) -> Problem:
    return Problem(model or bag(), ids(second, dtype), removed=(1, 0), **fields)


def classes(value: float) -> Problem:
    def data() -> Any:
        x, y = numbers(outlier=1.0)()
        y = (np.arange(8) % 3).astype(np.float32)
        y[1] = value
        return x, y

    def model() -> keras.Model:
        inputs = keras.Input((3,))
        return keras.Model(inputs, keras.layers.Dense(3)(inputs))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Problem(model, data, loss, removed=_SECOND)


def nothing_but_padding() -> Any:
    """Every weight is 0 but that of the second example."""
    x, y = numbers()()
    weights = np.zeros(len(x), np.float32)
    weights[1] = 1
    return x, y, weights


def cancelling() -> Any:
    """Positions of the second example that cancel nearly: the norm is tiny beside its terms."""
    x = np.ones((8, 64, 3), np.float32)
    x[1] = 1e4 * np.where(np.arange(64) % 2, 1, -1)[:, None]
    return x, np.full((8, 1), 3, np.float32)


def over_positions() -> keras.Model:
    inputs = keras.Input((64, 3))
    pooled = keras.ops.mean(keras.layers.Dense(64)(inputs), axis=1)
    return keras.Model(inputs, keras.layers.Dense(1)(pooled))


STYLES = {
    "per layer": dp_sparse.PerLayerClipping(),
    "automatic": dp_sparse.AutomaticClipping(),
}

HARMLESS = {
    "a feature that is NaN": features(np.nan),
    "a feature of 1e30": features(1e30),
    "a feature of 1e18": features(1e18),
    "a feature that is denormal": features(1e-42),
    "a label that is NaN": label(np.nan),
    "a label of 1e16": label(1e16),
    "a tiny clip norm": features(100.0, clip_norm=1e-6),
    "a huge clip norm": features(1e9, clip_norm=1e6),
    "a weight of 0": weighted(0.0),
    "a weight of 1e6": weighted(1e6),
    "all but one of weight 0": Problem(tower(), nothing_but_padding, removed=_SECOND),
    "ids five times the same": lookups([3] * 5),
    "ids that nobody else has": lookups([0, 0, 0, 0, 0]),
    "ids in three tables": lookups([3, 3, 4, 4, 5], two_tables),
    "masked ids": lookups([0, 0, 0, 1, 1], bag(mask_zero=True)),
    "ids all masked": lookups([0] * 5, bag(mask_zero=True)),
    "positions that cancel": Problem(over_positions, cancelling, removed=(1, 0)),
}
OUT_OF_RANGE = {
    "an id too large": lookups([ROWS, 1, 1, 1, 1]),
    "an id below 0": lookups([-1, 1, 1, 1, 1]),
    "a masked id below 0": lookups([-1, 0, 0, 0, 0], bag(mask_zero=True)),
    "a label beyond the classes": classes(3.0),
    "a label below 0": classes(-1.0),
    "a label that is NaN among classes": classes(np.nan),
}
EITHER = {
    "a label between classes": classes(0.5),
    "a negative weight": weighted(-5.0),
    "a weight that is NaN": weighted(np.nan),
    "ids that are floats": lookups([1.5, 2.5, 3.0, 4.0, 5.0], bag(dtype="float32"), "float32"),
    "ids that are NaN": lookups([np.nan] * 5, bag(dtype="float32"), "float32"),
}

ENTRIES = (
    [
        Entry(
            f"example: {name}", measured(of), MEASURED, ALL if name in _EVERYWHERE else ("graph",)
        )
        for name, of in HARMLESS.items()
    ]
    + [
        Entry(
            f"example: {name}",
            measured(of),
            REFUSED,
            ("graph", "xla") if name == "an id too large" else ("graph",),
        )
        for name, of in OUT_OF_RANGE.items()
    ]
    + [Entry(f"example: {name}", measured(of), REFUSED_OR_MEASURED) for name, of in EITHER.items()]
    + [
        Entry(
            f"example: clipped {name}",
            measured(features(50.0, optimizer={"clipping": style})),
            MEASURED,
        )
        for name, style in STYLES.items()
    ]
)
