"""Callbacks of private runs see released values alone, whatever class they are of."""

import csv
import importlib
import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import keras
import pytest

import dp_sparse
from dp_sparse.training import callback_guard
from tests.training import test_callback_guard as guard_cases
from tests.training.test_callback_guard import LOOPS, accepting, compiled, data

C = keras.callbacks
VALIDATION = {"val_loss", "val_accuracy", "val_auc"}


@pytest.fixture(autouse=True)
def nobody_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_guard, "_told", set())


@pytest.fixture(scope="module")
def trained() -> keras.Model:
    return compiled()


@pytest.fixture
def model(trained: keras.Model) -> keras.Model:
    """With a plan of 4 steps, none of which is taken."""
    compiled_again = dp_sparse.DPAdaFESTOptimizer("sgd", guard_cases.plan(), 1.0)
    trained.compile(compiled_again, "binary_crossentropy", metrics=["accuracy", "auc"])
    return trained


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> keras.callbacks.History:
    return guard_cases.fit(model, *callbacks, validation_data=data(), **options)


class Logger(keras.callbacks.Callback):
    """Writes all that it gets, as loggers of services do; and the same of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}

    def _write(self, hook: str, logs: Any) -> None:
        self.seen.setdefault(hook, set()).update(dict(logs or {}), [n for n, _ in logs.items()])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._write("batch", logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._write("epoch", {**logs})

    def on_train_end(self, logs: Any = None) -> None:
        self._write("end", logs)


def test_each_hook_that_gets_training_metrics_is_known() -> None:
    """A hook that a new Keras adds has to be looked at."""
    hooks = {name for name in dir(C.Callback) if name.startswith("on_")}
    told = {
        name for name in hooks if "logs" in inspect.signature(getattr(C.Callback, name)).parameters
    }
    before = {name for name in told if name.endswith("_begin")}
    held_out = {name for name in told if "_test_" in name or "_predict_" in name}
    assert told - before - held_out == set(callback_guard._WITH_METRICS)


def test_a_logger_gets_released_values(model: keras.Model) -> None:
    logger, report = Logger(), dp_sparse.PrivacyReport(points=1)
    history = fit(model, report, logger, C.LearningRateScheduler(lambda epoch: 0.1))
    shown = {"epsilon", *VALIDATION}
    assert logger.seen == {"batch": {"epsilon"}, "epoch": shown, "end": VALIDATION}
    assert {"loss", "auc", "learning_rate"} < set(history.history)  # which stays in the process


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_in_every_loop(loop: str) -> None:
    logger = Logger()
    LOOPS[loop](compiled(), logger)
    assert logger.seen.keys() >= {"epoch"} and not set().union(*logger.seen.values())


def test_one_that_accepts_the_leak_sees_all(model: keras.Model) -> None:
    logger = Logger()
    fit(model, logger, accepting())
    assert {"loss", "accuracy"} < logger.seen["batch"]


def test_a_file_of_keras_holds_released_values(model: keras.Model, tmp_path: Path) -> None:
    fit(model, C.CSVLogger(tmp_path / "log.csv"), epochs=2)
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert set(rows[0]) == {"epoch", *VALIDATION} and math.isfinite(float(rows[1]["val_loss"]))


def test_tensorboard_shows_released_values(
    model: keras.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By what it asks TensorFlow to write: TensorBoard itself need not be there."""
    written: list[str] = []

    def scalar(name: str, *_: Any, **__: Any) -> None:
        written.append(name)

    monkeypatch.setattr(importlib.import_module("tensorflow.summary"), "scalar", scalar)
    fit(model, C.TensorBoard(tmp_path, update_freq="batch", write_graph=False), epochs=2)
    assert {"epoch_loss", "epoch_auc"} <= set(written)  # of validation, whose prefix it drops
    assert written.count("epoch_loss") == 2
    assert not {"batch_loss", "batch_auc"} & set(written)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: C.EarlyStopping("loss"),
        lambda d: C.ReduceLROnPlateau("accuracy", mode="max"),
        lambda d: C.ModelCheckpoint(f"{d}/m.keras", monitor="loss", save_best_only=True),
        lambda d: C.LambdaCallback(on_epoch_end=lambda epoch, logs: f"{logs['loss']:.3f}"),
        lambda d: C.TerminateOnNaN(),
    ],
    ids=["stopping", "plateau", "best", "index", "NaN"],
)
def test_one_that_asks_for_a_training_metric_is_told(
    model: keras.Model, tmp_path: Path, make: Any
) -> None:
    """By a sentence, and training goes on."""
    with pytest.warns(UserWarning, match="asks for '(loss|accuracy)', a training metric.*\nUse a"):
        history = fit(model, make(tmp_path), epochs=3)
    assert history.epoch == [0, 1, 2]


def test_what_no_run_has_is_a_key_error() -> None:
    logs = callback_guard.ReleasedLogs({"loss": 1.0, "val_loss": 2.0}, "Mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert logs["val_loss"] == logs.get("val_loss") == 2.0 and logs.get("other") is None
        with pytest.raises(KeyError):
            logs["other"]


def test_stopping_by_validation_works_as_before(model: keras.Model) -> None:
    history = fit(model, C.EarlyStopping("val_loss", min_delta=100.0), epochs=4)
    assert history.epoch == [0, 1]


def test_stock_models_keep_their_callbacks() -> None:
    stock, logger = compiled(), Logger()
    stock.compile(optimizer="sgd", loss="mse")
    stock.fit(*data(), callbacks=[logger], verbose=0)
    assert "loss" in logger.seen["epoch"]


def test_a_list_that_is_used_again(model: keras.Model) -> None:
    logger = Logger()
    run = C.CallbackList([logger], model=model)
    for _ in range(2):
        logger.seen.clear()
        run.on_train_begin()
        run.on_train_batch_end(0, {"loss": 1.0})
        run.on_epoch_end(0, {"loss": 1.0, "val_loss": 1.0})
        assert logger.seen == {"batch": set(), "epoch": {"val_loss"}}
