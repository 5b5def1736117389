"""What the version before saved loads, trains on, and keeps its budget."""

import json
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError
from tests.saved_before.make import DATA, OPTIMIZERS, SPENT, STEPS, compiled, plan_of

FOLDER = pathlib.Path(__file__).parent
NAMES = list(OPTIMIZERS)


def plan_saved(name: str) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan.from_config(json.loads((FOLDER / "plans.json").read_text())[name])


def predicts_as_before(model: keras.Model, name: str) -> None:
    with np.load(FOLDER / "predictions.npz") as before:
        np.testing.assert_allclose(model.predict(DATA[0], verbose=0), before[name], rtol=1e-5)


def trains_to_its_end(model: keras.Model, name: str) -> None:
    optimizer = model.optimizer
    assert int(optimizer.steps_spent) == SPENT
    sampling = plan_of(name).sampling
    resumed = {"first_step": SPENT} if isinstance(sampling, dp_sparse.StreamSampling) else {}
    model.fit(sampling.batches(DATA, **resumed), steps_per_epoch=STEPS - SPENT, verbose=0)
    assert int(optimizer.steps_spent) == STEPS
    with pytest.raises(PrivacyError, match="no steps left: 5 of 5"):
        model.fit(plan_of(name).sampling.batches(DATA), verbose=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_the_same(name: str) -> None:
    assert plan_saved(name) == plan_of(name)
    assert plan_saved(name).fingerprint == plan_of(name).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_predicts_as_before_and_trains_on(
    name: str, new_process: Callable[[], None]
) -> None:
    new_process()
    model = keras.models.load_model(FOLDER / f"{name}.keras")
    predicts_as_before(model, name)
    trains_to_its_end(model, name)


def test_weights_load_into_a_model_compiled_alike(new_process: Callable[[], None]) -> None:
    new_process()
    model = compiled("adafest")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(FOLDER / "adafest.weights.h5")
    predicts_as_before(model, "adafest")
    trains_to_its_end(model, "adafest")


def test_a_checkpoint_of_tensorflow_restores(new_process: Callable[[], None]) -> None:
    new_process()
    model = compiled("adafest")
    model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.read(str(FOLDER / "checkpoint")).assert_existing_objects_matched()
    predicts_as_before(model, "adafest")
    trains_to_its_end(model, "adafest")


def test_selected_rows_load() -> None:
    rows = dp_sparse.SelectedRows.load(FOLDER / "rows.npz", {"embedding": 11, "embedding_1": 7})
    found = {name: rows.row_ids[name].tolist() for name in ("embedding", "embedding_1")}
    assert found == {"embedding": [0, 2, 4, 6, 8, 10], "embedding_1": [0, 2, 4, 6]}
