"""Saving, loading, resuming: the budget goes on where it stopped, the noise key never returns."""

import json
import pathlib
import signal
import zipfile
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError
from tests.subprocesses import run_python, start_python
from tests.training_cases import click_model, clicks, plan_for, weights_of


def trained(steps: int = 2, *, of: int = 5) -> tuple[keras.Model, Any, Any]:
    data = clicks(8)
    model, plan = click_model(), plan_for(8, steps=of, noise_multiplier=0.5)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.Adagrad(0.1), plan, clip_norm=1.0)
    model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    model.fit(plan.sampling.batches(data), steps_per_epoch=steps, verbose=0)
    return model, plan, data


def test_save_load_fit_stays_private_and_within_budget(
    tmp_path: pathlib.Path, new_process: Any
) -> None:
    model, plan, data = trained(2, of=5)
    key = model.optimizer._account.noise_key._key.numpy()
    model.save(tmp_path / "model.keras")
    new_process()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, dp_sparse.DPAdaFESTOptimizer)
    assert loaded.optimizer.plan == plan
    assert int(loaded.optimizer.steps_spent) == int(loaded.optimizer.iterations) == 2
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs))
    assert loaded.optimizer._account.noise_key._key.numpy() != key
    with pytest.raises(PrivacyError, match="without its marker"):
        loaded.fit(*data, verbose=0)
    loaded.fit(plan.sampling.batches(data), steps_per_epoch=3, verbose=0)
    assert int(loaded.optimizer.steps_spent) == 5
    with pytest.raises(PrivacyError, match="no steps left: 5 of 5"):
        loaded.fit(plan.sampling.batches(data), verbose=0)


@pytest.mark.slow
def test_slots_go_on_after_loading(tmp_path: pathlib.Path, every_row_survives: None) -> None:
    """Five steps in one go equal two, a save, a load, and three: slots of rows and of the rest."""
    keras.utils.set_random_seed(5)
    whole, _, _ = trained(5, of=5)
    keras.utils.set_random_seed(5)
    model, plan, data = trained(2, of=5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.fit(plan.sampling.batches(data), steps_per_epoch=3, verbose=0)
    for one_go, resumed in zip(weights_of(whole), weights_of(loaded), strict=True):
        np.testing.assert_allclose(one_go, resumed, atol=1e-5)


@pytest.fixture
def every_row_survives(no_noise: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise either, so that two runs can be compared."""
    from dp_sparse.optimizers import adafest

    monkeypatch.setattr(adafest, "default_threshold", lambda *_: -1e6)


def test_a_loaded_file_never_gives_steps_back(tmp_path: pathlib.Path) -> None:
    """In one process: save at 2, train to 4, load the old file: 4 remain spent."""
    model, plan, data = trained(2, of=5)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "early.weights.h5")
    model.fit(plan.sampling.batches(data), steps_per_epoch=2, verbose=0)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.steps_left == 1
    loaded.fit(plan.sampling.batches(data), verbose=0)
    assert (
        int(loaded.optimizer.iterations) == 3
    )  # the two that were saved, and the one that is left
    with pytest.raises(PrivacyError, match="no steps left: 5 of 5"):
        loaded.fit(plan.sampling.batches(data), verbose=0)
    key = model.optimizer._account.noise_key._key.numpy()
    model.load_weights(tmp_path / "early.weights.h5")
    assert int(model.optimizer.steps_spent) == 4
    assert model.optimizer._account.noise_key._key.numpy() != key


def test_no_file_holds_a_key(tmp_path: pathlib.Path) -> None:
    """Neither archive, nor weights file, nor TensorFlow checkpoint, nor configuration."""
    model, _, _ = trained()
    key = model.optimizer._account.noise_key._key.numpy()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "checkpoint"))
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        contents = b"".join(archive.read(name) for name in archive.namelist())
    contents += b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert key.tobytes() not in contents
    assert str(int(key[0])) not in json.dumps(model.optimizer.get_config())
    assert not any("key" in variable.path for variable in model.optimizer.variables)


def test_the_optimizer_saves_its_own_variables_alone() -> None:
    """Not the tables: they would be written twice, and read back from the optimizer."""
    model, _, _ = trained()
    own = {id(variable) for variable in model.optimizer.variables}
    assert not own & {id(variable) for variable in model.variables}


def test_weights_of_another_optimizer_are_refused(tmp_path: pathlib.Path) -> None:
    model, plan, _ = trained()
    model.save_weights(tmp_path / "m.weights.h5")
    other = click_model()
    other.compile(optimizer=dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(Exception, match="the spent steps would be lost"):
        other.load_weights(tmp_path / "m.weights.h5")


@pytest.mark.slow
def test_export_is_the_plain_model(tmp_path: pathlib.Path) -> None:
    model, _, (x, _) = trained()
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(
        served.serve(x).numpy(), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )


# ---- A run that is killed.

RUN = """
    import dataclasses, json, os, pathlib, sys
    import keras, numpy as np, tensorflow as tf
    import dp_sparse
    from tests.training_cases import click_model, clicks

    folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
    data = clicks(8)
    sampling = dp_sparse.PoissonSampling(num_examples=8, expected_batch_size=8, steps=12)
    plan = dataclasses.replace(
        dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling),
        noise_multiplier=0.5, plan_id="the same plan in both processes",
    )
    class Tell(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                key = int(self.model.optimizer._account.noise_key._key.numpy()[0])
                print(json.dumps({"spent": int(self.model.optimizer.steps_spent), "key": key}))
        def on_train_batch_end(self, batch, logs=None):
            print(json.dumps({"done": int(self.model.optimizer.steps_spent)}))

    saved = folder / "model.keras"
    if how == "checkpoint" and saved.exists():
        model = keras.models.load_model(saved)
    else:
        model = click_model()
        model.compile(
            optimizer=dp_sparse.DPAdaFESTOptimizer(keras.optimizers.Adagrad(0.1), plan, 1.0),
            loss="binary_crossentropy",
        )
    keeper = {
        "backup": lambda: keras.callbacks.BackupAndRestore(
            folder / "backup", delete_checkpoint=False
        ),
        "checkpoint": lambda: keras.callbacks.ModelCheckpoint(saved),
    }[how]()
    model.fit(
        plan.sampling.batches(data), epochs=int(sys.argv[3]), steps_per_epoch=3, verbose=0,
        callbacks=[keeper, Tell()],
    )
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["backup", "checkpoint"])
def test_a_killed_run_resumes_within_its_budget_and_with_a_fresh_key(
    how: str, tmp_path: pathlib.Path
) -> None:
    """12 steps in epochs of 3; SIGKILL in the third; the second process may not pass step 12."""
    process = start_python(RUN, str(tmp_path), how, "100")
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(json.loads(line))
        if lines[-1].get("done") == 8:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL
    printed = [json.loads(line) for line in run_python(RUN, str(tmp_path), how, "100").splitlines()]
    first, last = printed[0], printed[-1]
    assert first["spent"] == 6  # what the last whole epoch had spent
    assert first["key"] not in {line.get("key") for line in lines}
    assert [line["done"] for line in printed if "done" in line] == list(range(7, 13))
    assert last == {"done": 12}
