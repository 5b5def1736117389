"""Models to export, trained for a few steps, and what is in an export's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from tests.training_cases import CHOOSING, click_model, clicks, plan_for

STEPS = 40


def tied_model() -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(7, 4, tie_weights=True)
    outputs = table(keras.layers.Dense(4)(table(ids)), reverse=True)
    return keras.Model(ids, outputs, name="tied")


def shared_table() -> keras.Model:
    """Two features on one table, and a frozen table of another dtype."""
    ids = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(11, 3, name="shared")
    frozen = keras.layers.Embedding(7, 2, trainable=False, dtype="bfloat16")
    rows = [table(ids[:, 0]), table(ids[:, 1]), frozen(ids[:, 1])]
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))


def of_policy(policy: str) -> Callable[[], keras.Model]:
    def made() -> keras.Model:
        ids = keras.Input((2,), dtype="int32")
        rows = keras.layers.Embedding(11, 3, dtype=policy)(ids)
        flat = keras.layers.Flatten(dtype=policy)(rows)
        return keras.Model(ids, keras.layers.Dense(1, dtype=policy)(flat))

    return made


def with_dropout() -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Dropout(0.5)(keras.layers.Embedding(11, 3)(ids))
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def with_an_inner_model() -> keras.Model:
    inner = click_model()
    inner.compile("sgd", "mse", metrics=["mae"])
    ids = keras.Input((2,), dtype="int32")
    return keras.Model(ids, keras.layers.Dense(1)(inner(ids)))


def sequential() -> keras.Model:
    """Has no weights before it sees a batch."""
    layers = [keras.layers.Embedding(11, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "clicks": click_model,
    "tied": tied_model,
    "shared": shared_table,
    "sequential": sequential,
    "inner": with_an_inner_model,
    "dropout": with_dropout,
    "mixed_bfloat16": of_policy("mixed_bfloat16"),
    "mixed_float16": of_policy("mixed_float16"),
}


def examples(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, 8 of them."""
    x, y = clicks(8, (7, 7))
    return (x, np.tile(y[:, None, None], (1, 2, 7))) if model.name == "tied" else (x, y)


def optimizer_of(kind: str, model: keras.Model, **options: Any) -> Any:
    """An optimizer of a plan of its own."""
    if kind == "exponential":
        mechanism = dp_sparse.ExponentialSelection(rows_per_step=3)
        sampling = dp_sparse.PoissonSampling(8, 8, STEPS)
        plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling, mechanism)
        return dp_sparse.ExponentialSelectionOptimizer("sgd", plan.calibrate(), 0.5)
    plan = plan_for(8, steps=STEPS, noise_multiplier=0.5)
    if kind == "lazy":
        return dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.1), plan, 0.5)
    return CHOOSING[kind](model, plan)


def compiled(model: keras.Model, kind: str = "adafest") -> keras.Model:
    model.compile(optimizer=optimizer_of(kind, model), loss="mse", metrics=["mae"])
    return model


def train(model: keras.Model, steps: int = 1, callbacks: Any = ()) -> None:
    batches = model.optimizer.plan.sampling.batches(examples(model))
    model.fit(batches, steps_per_epoch=steps, epochs=1, callbacks=list(callbacks), verbose=0)


def trained(
    kind: str = "adafest", make: Callable[[], keras.Model] = click_model, steps: int = 2
) -> keras.Model:
    """After some steps; of none only built, which takes less time."""
    model = compiled(make(), kind)
    if steps:
        train(model, steps)
    model(examples(model)[0])
    return model


def keras_weights(path: Path) -> dict[str, Any]:
    """Shape, dtype and bytes of each dataset of Keras' file of weights."""
    found = {}

    def note(name: str, what: Any) -> None:
        if isinstance(what, h5py.Dataset):
            found[name] = what.shape, what.dtype.str, np.array(what).tobytes()

    with h5py.File(path / "keras" / "model.weights.h5") as file:
        file.visititems(note)
    return found


def saved_weights(path: Path) -> dict[str, Any]:
    """Shape, dtype and bytes of each tensor of the SavedModel's checkpoint."""
    reader = tf.train.load_checkpoint(str(path / "saved_model" / "variables" / "variables"))
    names = reader.get_variable_to_shape_map().keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    values = {name: reader.get_tensor(name) for name in names}
    return {name: (v.shape, v.dtype.name, v.tobytes()) for name, v in values.items()}


def content(path: Path) -> dict[str, Any]:
    """Everything that two exports of one model have in common."""
    config = json.loads((path / "keras" / "config.json").read_text())
    manifest = json.loads((path / "export.json").read_text())
    del manifest["served"]  # the layout of files may differ
    statement = (path / "statement.txt").read_text()
    return {
        "keras": keras_weights(path),
        "saved_model": saved_weights(path),
        "config": config,
        "manifest": manifest,
        "statement": statement,
    }
