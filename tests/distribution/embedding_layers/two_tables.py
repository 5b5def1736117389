"""A small problem for embedding layers of every kind, and its private update done the slow way."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import keras_rs
import numpy as np
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution
from dp_sparse.distribution.embedding_layers.host_step import HostStep
from dp_sparse.distribution.embedding_layers.layer_adapters import TableLayer, layer_of
from dp_sparse.distribution.embedding_layers.training_loop import _Steps, build_all
from tests.training_cases import plan_for

SIZE, WIDTH, CLIP = 20, 3, 0.3
ROWS = {"shared": 40, "bag": 30}
FEATURES = {"left": "shared", "right": "shared", "words": "bag"}  # feature: table
BAG = 4
E = tf.tpu.experimental.embedding


Values = dict[str, np.ndarray]
Made = tuple[Any, Callable[[], Values]]  # a layer, and how to read its tables

INITIAL = {
    name: np.random.default_rng(5).normal(size=(rows, WIDTH)).astype("float32")
    for name, rows in ROWS.items()
}


def data(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    left = rng.integers(0, 12, SIZE)
    x = {
        "left": left,
        "right": np.where(rng.random(SIZE) < 0.3, left, rng.integers(0, ROWS["shared"], SIZE)),
        "words": rng.integers(-1, 20, (SIZE, BAG)),
        "word_weights": rng.integers(0, 3, (SIZE, BAG)).astype("float32"),
        "dense_features": rng.normal(size=(SIZE, 2)).astype("float32"),
    }
    return x, rng.integers(0, 2, SIZE).astype("float32")


def tf_features(combiner: str = "sum") -> dict[str, Any]:
    """Of `tf.tpu.experimental.embedding`."""
    rng = np.random.default_rng(1)
    tables = {
        name: E.TableConfig(
            rows,
            WIDTH,
            initializer=lambda shape, dtype: tf.constant(rng.normal(size=shape), dtype),
            combiner=combiner,
            name=name,
        )
        for name, rows in ROWS.items()
    }
    return {name: E.FeatureConfig(tables[table], name=name) for name, table in FEATURES.items()}


def keras_rs_features(combiner: str = "sum") -> dict[str, Any]:
    tables = {
        name: keras_rs.layers.TableConfig(name, rows, WIDTH, combiner=combiner)
        for name, rows in ROWS.items()
    }
    shapes = {name: (SIZE,) for name in FEATURES}
    return {
        name: keras_rs.layers.FeatureConfig(name, tables[table], shapes[name], (SIZE, WIDTH))
        for name, table in FEATURES.items()
    }


def private_optimizer(
    wrapped: str = "sgd", *, noise_multiplier: float = 0.15, steps: int = 100, **arguments: Any
) -> dp_sparse.DPAdaFESTOptimizer:
    made = {
        "sgd": keras.optimizers.SGD(0.5),
        "adagrad": keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.2),
    }
    plan = plan_for(SIZE, noise_multiplier=noise_multiplier, steps=steps)
    if "threshold" not in arguments:
        arguments = {"expected_false_rows": 6, **arguments}
    return dp_sparse.DPAdaFESTOptimizer(made[wrapped], plan, CLIP, **arguments)


def private_tables(
    optimizer: dp_sparse.DPAdaFESTOptimizer,
    features: Mapping[str, Any] | None = None,
    *,
    weighted: bool = True,
    **arguments: Any,
) -> distribution.PrivateTables:
    weights = {"words": "word_weights"} if weighted else {}
    features = tf_features() if features is None else features
    return distribution.PrivateTables(
        features, optimizer, bags={"words": BAG}, weights=weights, **arguments
    )


def tables_and_layer(**arguments: Any) -> tuple[distribution.PrivateTables, Any]:
    tables = private_tables(private_optimizer(**arguments))
    return tables, E.TPUEmbeddingForServing(tables.feature_config, None)


def compiled_model(
    optimizer: Any,
    *,
    weighted: bool = True,
    dropout: float = 0.0,
    hidden: int = 5,
    **arguments: Any,
) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = {name: keras.Input((WIDTH,), name=name) for name in FEATURES}
    inputs["dense_features"] = keras.Input((2,), name="dense_features")
    if not weighted:
        inputs["word_weights"] = keras.Input((BAG,), name="word_weights")
    joined = keras.layers.Concatenate()([inputs[name] for name in (*FEATURES, "dense_features")])
    units = keras.layers.Dense(hidden, activation="tanh")(joined)
    outputs = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Dropout(dropout)(units))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, **{"loss": "binary_crossentropy", **arguments})
    return model


def prepared(tables: distribution.PrivateTables, source: Any) -> Any:
    """A batch as the host makes it, whose choice would show wrong masks and wrong norms."""
    batches = tables.private_optimizer.plan.sampling.batches(source)
    first_of_a_pass = batches.map(HostStep(tables)).take(1).repeat()
    return next(batch for batch in first_of_a_pass if _telling(source[0], batch))


def _telling(x: Any, batch: Any) -> bool:
    """Whether rows were chosen and not, looked up and not, once by an example and twice."""
    chosen = {t: {*batch["features"][f"private_noise_{t}"].values.numpy()} for t in ROWS}
    looked_up = {"shared": {*x["left"], *x["right"]}, "bag": {*x["words"].flat} - {-1}}
    left, right = (np.isin(x[name], [*chosen["shared"]]) for name in ("left", "right"))
    same = x["left"] == x["right"]
    return (
        all(looked_up[table] & chosen[table] for table in ROWS)
        and all(looked_up[table] - chosen[table] for table in ROWS)
        and any(chosen[table] - looked_up[table] for table in ROWS)
        and bool((left & right & same).any() and (left & right & ~same).any())
    )


def take_step(
    model: keras.Model, tables: distribution.PrivateTables, layer: Any, source: Any, batch: Any
) -> None:
    batches = tables.private_optimizer.plan.sampling.batches(source)
    own = layer if isinstance(layer, TableLayer) else layer_of(layer, tables)
    build_all(model, tables, own, batches.element_spec)
    _Steps(model, tables, own).take(batch)


@dataclasses.dataclass
class Update:
    """What a step must do, in float64.

    Attributes:
        tables: Each table after the step.
        dense: Σ_i f_i g_i of the dense variables.
        chosen: The rows of each table's choice.
    """

    tables: dict[str, np.ndarray]
    dense: list[np.ndarray]
    chosen: dict[str, np.ndarray]


def expected_update(
    model: keras.Model,
    before: Mapping[str, np.ndarray],
    source: Any,
    batch: Any,
    *,
    wrapped: str,
    combiner: str = "sum",
    weighted: bool = True,
) -> Update:
    """The private update by one gradient an example, a scatter, and the textbook's row update.

    Of `batch` only the choice and its noise are read: the rest is computed from the source.
    """
    x, y = source
    chosen, total = {}, {}
    for table in before:
        ids, noise = batch["features"][f"private_noise_{table}"], batch["noise"][table].numpy()
        chosen[table] = ids.values.numpy()
        total[table] = np.zeros(before[table].shape)
        np.add.at(total[table], chosen[table], noise[np.diff(ids.row_splits.numpy()) > 0])
    dense: list[np.ndarray] = [np.zeros(v.shape) for v in model.trainable_variables]
    for i in range(SIZE):
        rows, gradients = _gradient_of(model, before, x, y, i, combiner, weighted)
        rows = {key: g for key, g in rows.items() if key[1] in chosen[key[0]]}
        squares = [np.sum(g**2) for g in (*rows.values(), *gradients)]
        factor = min(1.0, CLIP / np.sqrt(np.sum(squares)))
        for (table, row), gradient in rows.items():
            total[table][row] += factor * gradient / SIZE
        dense = [whole + factor * own for whole, own in zip(dense, gradients, strict=True)]
    tables = {}
    for table, gradient in total.items():
        divisor = 1.0 if wrapped == "sgd" else np.sqrt(0.2 + gradient**2)
        tables[table] = before[table] - 0.5 * gradient / divisor
    return Update(tables, dense, chosen)


def assert_update(
    make: Callable[..., Made], features: Any, wrapped: str, combiner: str, weighted: bool
) -> None:
    """To 1e-6, and on exactly the rows that were chosen: some looked up, some by noise alone."""
    optimizer, source = private_optimizer(wrapped), data()
    tables = private_tables(optimizer, features, weighted=weighted)
    layer, values = make(tables)
    model = compiled_model(optimizer, weighted=weighted)
    batch = prepared(tables, source)
    before = {name: table.copy() for name, table in values().items()}
    expected = expected_update(
        model, before, source, batch, wrapped=wrapped, combiner=combiner, weighted=weighted
    )
    take_step(model, tables, layer, source, batch)
    after = values()
    for name, table in expected.tables.items():
        np.testing.assert_allclose(after[name], table, atol=1e-6)
        changed = np.flatnonzero((after[name] != before[name]).any(1))
        np.testing.assert_array_equal(changed, np.sort(expected.chosen[name]))


def _gradient_of(
    model: keras.Model, tables: Any, x: Any, y: Any, i: int, combiner: str, weighted: bool
) -> tuple[dict[tuple[str, int], np.ndarray], list[np.ndarray]]:
    lookups = []  # (feature, row, gain)
    for name in ("left", "right"):
        lookups.append((name, int(x[name][i]), 1.0))
    there = x["words"][i] >= 0
    weights = np.where(there, x["word_weights"][i] if weighted else 1.0, 0.0).astype("float64")
    divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt(np.sum(weights**2))}[combiner]
    for row, weight in zip(x["words"][i], weights, strict=True):
        if weight > 0:
            lookups.append(("words", int(row), weight / divisor))
    activations = {name: np.zeros(WIDTH) for name in FEATURES}
    for name, row, gain in lookups:
        activations[name] += gain * tables[FEATURES[name]][row]
    inputs = {name: tf.constant(a[np.newaxis], tf.float32) for name, a in activations.items()}
    rest = ("dense_features",) if weighted else ("dense_features", "word_weights")
    others = {name: tf.constant(x[name][i : i + 1]) for name in rest}
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        loss = keras.losses.binary_crossentropy(y[i : i + 1, None], model({**others, **inputs}))
    of_inputs, dense = tape.gradient(loss, [inputs, variables])
    rows: dict[tuple[str, int], np.ndarray] = {}
    for name, row, gain in lookups:
        own = gain * of_inputs[name].numpy()[0].astype("float64")
        key = (FEATURES[name], row)
        rows[key] = rows.get(key, 0.0) + own
    return rows, [g.numpy().astype("float64") for g in dense]
