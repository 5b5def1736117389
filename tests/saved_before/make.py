"""Trains and saves small models, by whichever version of dp_sparse runs it.

The files beside it were made at commit acb341c, before the modules of the package were moved into
rooms, "shuffled" at 351ca10: `python -m tests.saved_before.make FOLDER [NAME ...]`. They must load,
train on, and keep their budget.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from tests.training_cases import click_model, clicks, selected_rows

EXAMPLES, STEPS, SPENT = 8, 5, 2
DATA = clicks(EXAMPLES)
QUANTILE = dp_sparse.QuantileClipping(0.5)
EXPONENTIAL = dp_sparse.ExponentialSelection(rows_per_step=3)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adafest": lambda model, plan: dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.Adagrad(0.1), plan, 1.0
    ),
    "adafest_plus": lambda model, plan: dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.Adam(0.1), plan, 1.0, rows=selected_rows(model)
    ),
    "fest": lambda model, plan: dp_sparse.DPFESTOptimizer(
        keras.optimizers.Adam(0.1), plan, 1.0, selected_rows(model), microbatch_size=4
    ),
    "dpsgd_quantile": lambda model, plan: dp_sparse.DPSGDOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), plan, 1.0, clipping=QUANTILE
    ),
    "exponential": lambda model, plan: dp_sparse.ExponentialSelectionOptimizer(
        keras.optimizers.Adagrad(0.1), plan, 1.0
    ),
    "lazy": lambda model, plan: dp_sparse.LazyDPSGDOptimizer(keras.optimizers.SGD(0.1), plan, 1.0),
    "shuffled": lambda model, plan: dp_sparse.ShuffledDPSGDOptimizer(
        keras.optimizers.Adam(0.1), plan, 1.0, batch_clip_norm=2.0
    ),
}


def plan_of(name: str) -> dp_sparse.PrivacyPlan:
    """A plan of five steps; streams for DP-FEST, Poisson batches for the rest."""
    sampling: Any = dp_sparse.PoissonSampling(EXAMPLES, EXAMPLES, STEPS)
    if name == "fest":
        sampling = dp_sparse.StreamSampling(EXAMPLES, EXAMPLES, STEPS)
    fields: dict[str, Any] = {"mechanism": EXPONENTIAL} if name == "exponential" else {}
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling, **fields)
    return dataclasses.replace(plan, noise_multiplier=3.0, plan_id=f"saved before: {name}")


def compiled(name: str) -> keras.Model:
    model = click_model()
    model.compile(OPTIMIZERS[name](model, plan_of(name)), loss="binary_crossentropy")
    return model


def main(folder: pathlib.Path, *names: str) -> None:
    """Adds models to what is in the folder."""
    plans, predictions = folder / "plans.json", folder / "predictions.npz"
    configs = json.loads(plans.read_text()) if plans.exists() else {}
    values = dict(np.load(predictions)) if predictions.exists() else {}
    for name in names or OPTIMIZERS:
        values[name] = save(folder, name)
        configs[name] = plan_of(name).get_config()
    plans.write_text(json.dumps(configs, indent=1))
    np.savez(predictions, **values)


def save(folder: pathlib.Path, name: str) -> np.ndarray:
    """Trains and saves a model; returns what it predicts."""
    keras.utils.set_random_seed(5)
    model = compiled(name)
    model.fit(plan_of(name).sampling.batches(DATA), steps_per_epoch=SPENT, verbose=0)
    model.save(folder / f"{name}.keras")
    if name == "adafest":
        model.save_weights(folder / "adafest.weights.h5")
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.write(str(folder / "checkpoint"))
        selected_rows(model).save(folder / "rows.npz")
    return model.predict(DATA[0], verbose=0)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
