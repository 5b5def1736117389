"""What a user does with runs: forks, resumes, saves, freezes, slows down; any optimizer."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism

import dp_sparse
from tests.subprocesses import in_fork
from tests.training_cases import marked_dataset, plan_for

SIZE = 8


def model_of(*layers: keras.layers.Layer) -> keras.Model:
    """On two features; a hidden layer, then the output."""
    layers = layers or (keras.layers.Dense(3, name="hidden"), keras.layers.Dense(1, name="head"))
    return keras.Sequential([keras.Input((2,)), *layers])


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SIZE, 2)).astype(np.float32), np.ones((SIZE, 1), np.float32)


def compiled(model: keras.Model, plan: dp_sparse.PrivacyPlan, rate: float = 0.1) -> keras.Model:
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(rate), plan, clip_norm=1.0)
    model.compile(optimizer, loss="mse")
    return model


def train(model: keras.Model, steps: int = 1, **options: Any) -> Any:
    """One epoch of so many steps."""
    batches = marked_dataset(model.optimizer.plan, *data(), steps=steps)
    return model.fit(batches, verbose=0, **options)


@pytest.fixture
def plan() -> dp_sparse.PrivacyPlan:
    return plan_for(SIZE, steps=4, noise_multiplier=1.0)


@pytest.fixture
def model(plan: dp_sparse.PrivacyPlan) -> keras.Model:
    """Trained for two steps of four."""
    model = compiled(model_of(), plan)
    train(model, 2)
    return model


def test_a_fork_of_a_process_that_trained(model: keras.Model) -> None:
    """Children draw noise of their own, of which the parent's run notices nothing."""
    key = model.optimizer._account.noise_key

    def words() -> bytes:
        return key.words().numpy()[:, :2].tobytes()

    before = words()
    assert len({before, in_fork(words), in_fork(words)}) == 3
    train(model)
    assert words() == before and model.optimizer.steps_left == 1


def test_a_resumed_run(plan: dp_sparse.PrivacyPlan, tmp_path: Path, new_process: Any) -> None:
    """Goes on behind its last checkpoint, under another key, and ends with the plan."""
    keys = []
    for expected, steps in ((0, 1), (1, 3)):
        model = compiled(model_of(), plan)
        checkpoint = dp_sparse.PrivateCheckpoint(str(tmp_path))
        assert checkpoint.restore(model) == expected
        keys.append(model.optimizer._account.noise_key.words().numpy()[0, 0])
        train(model, steps, callbacks=[checkpoint])
        checkpoint._folder._lock = None  # as when the process ends
        new_process()
    assert keys[0] != keys[1]
    assert model.optimizer.steps_left == 0 and checkpoint.steps == [1, 4]


def test_save_load_and_fit(model: keras.Model, tmp_path: Path, new_process: Any) -> None:
    model.save(tmp_path / "model.keras")
    new_process()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(data()[0], verbose=0), model(data()[0]))
    assert loaded.optimizer.steps_left == 2
    train(loaded, 2)
    with pytest.raises(dp_sparse.PrivacyError, match="no steps left: 4 of 4 are spent"):
        train(loaded)


def test_two_stage_freezing(plan: dp_sparse.PrivacyPlan) -> None:
    """First the head, then all layers, on the steps of one plan."""
    model = model_of()
    hidden, head = (model.get_layer(name) for name in ("hidden", "head"))
    start = [np.array(layer.kernel) for layer in (hidden, head)]
    hidden.trainable = False
    train(compiled(model, plan), 2)
    first = [np.array(layer.kernel) for layer in (hidden, head)]
    np.testing.assert_array_equal(first[0], start[0])
    assert np.all(first[1] != start[1])
    hidden.trainable = True
    train(compiled(model, plan), 2)
    assert model.optimizer.steps_left == 0
    second = [np.array(layer.kernel) for layer in (hidden, head)]
    assert all(np.all(a != b) for a, b in zip(first, second, strict=True))


def test_a_rate_that_drops_on_a_plateau(plan: dp_sparse.PrivacyPlan) -> None:
    """By a loss on held-out data; not by the training loss, which no epsilon covers."""
    model = compiled(model_of(), plan, rate=0.5)

    def plateau(monitor: str) -> keras.callbacks.Callback:
        return keras.callbacks.ReduceLROnPlateau(monitor, factor=0.5, patience=1, min_delta=1e9)

    batches = marked_dataset(plan, *data(), steps=3)
    model.fit(
        batches,
        epochs=3,
        steps_per_epoch=1,
        validation_data=data(),
        callbacks=[plateau("val_loss"), plateau("loss")],
        verbose=0,
    )
    assert float(model.optimizer.learning_rate) == 0.125


def test_op_determinism(plan: dp_sparse.PrivacyPlan) -> None:
    """Fixes what operations compute, not the noise: two runs end in other weights."""
    keras.utils.set_random_seed(0)
    start = model_of().get_weights()
    tf.config.experimental.enable_op_determinism()
    try:
        ends = []
        for _ in range(2):
            model = compiled(model_of(), plan)
            model.set_weights(start)
            train(model)
            ends.append(model.get_weights()[0])
    finally:
        disable_op_determinism()
    assert np.all(ends[0] != ends[1])


OPTIMIZERS = [
    keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    keras.optimizers.RMSprop(),
    keras.optimizers.Adam(amsgrad=True),
    keras.optimizers.AdamW(),
    keras.optimizers.Adadelta(0.1),
    keras.optimizers.Adagrad(),
    keras.optimizers.Adamax(),
    keras.optimizers.Adafactor(),
    keras.optimizers.Nadam(),
    keras.optimizers.Ftrl(0.1),
    keras.optimizers.Lion(),
    keras.optimizers.ScheduleFreeAdamW(),
    keras.optimizers.Lamb(),
    keras.optimizers.Muon(),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("wrapped", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_every_optimizer_of_keras(
    wrapped: Any, plan: dp_sparse.PrivacyPlan, tmp_path: Path
) -> None:
    """One step inside DP-SGD moves every weight, and a saved model goes on with its slots."""
    model = model_of()
    before = model.get_weights()
    wrapped = type(wrapped).from_config(wrapped.get_config())
    model.compile(dp_sparse.DPSGDOptimizer(wrapped, plan, clip_norm=1.0), loss="mse")
    train(model)
    for old, new in zip(before, model.get_weights(), strict=True):
        assert np.all(np.isfinite(new)) and np.all(old != new)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for own, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(own, other)
