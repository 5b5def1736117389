"""Callbacks that cannot run beside private training, and what files of the others hold."""

import importlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse import distribution
from dp_sparse.core.errors import PrivacyError
from tests.distribution.embedding_layers import two_tables
from tests.training_cases import plan_for

N, V = 40, 50


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, V, (N, 2)).astype(np.int32)
    return ids, (ids[:, :1] < 10).astype(np.float32)


def plan() -> dp_sparse.PrivacyPlan:
    return plan_for(N, steps=4, noise_multiplier=1.0)


def compiled(metrics: Any = ("accuracy", "auc")) -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(V, 4)(ids))
    model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(rows))
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan(), 1.0)
    model.compile(optimizer, "binary_crossentropy", metrics=list(metrics))
    return model


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> keras.callbacks.History:
    batches = model.optimizer.plan.sampling.batches(data())
    options = {"steps_per_epoch": 1, "verbose": 0, **options}
    return model.fit(batches, callbacks=list(callbacks), **options)


def begin(model: keras.Model, *callbacks: Any) -> None:
    """What every loop does first."""
    keras.callbacks.CallbackList(list(callbacks), model=model).on_train_begin()


def by_train(model: keras.Model, *callbacks: Any) -> Any:
    return distribution.train(model, data(), steps_per_epoch=1, callbacks=callbacks)


def by_train_tables(_: keras.Model, *callbacks: Any) -> Any:
    tables = two_tables.private_tables(two_tables.private_optimizer())
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    model = two_tables.compiled_model(tables.private_optimizer)
    return distribution.train_tables(
        model, tables, layer, two_tables.data(), steps_per_epoch=1, callbacks=callbacks
    )


LOOPS: dict[str, Callable[..., Any]] = {
    "fit": fit,
    "train": by_train,
    "train_tables": by_train_tables,
}


def accepting() -> dp_sparse.PrivacyReport:
    return dp_sparse.PrivacyReport(diagnostics="non_private", points=1)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return compiled()


@pytest.fixture
def orbax(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """Stands in for Orbax, which the tests' environment does not have."""
    module = importlib.import_module("keras.src.callbacks.orbax_checkpoint")
    monkeypatch.setattr(module, "ocp", mock.MagicMock())
    return module.ocp


C = keras.callbacks
LEAKS = {
    "file name": lambda d: C.ModelCheckpoint(f"{d}/{{loss:.3f}}.keras"),
    "orbax": lambda d: C.OrbaxCheckpoint(d, save_on_background=False),
    "a list in the list": lambda d: C.CallbackList([C.ModelCheckpoint(f"{d}/{{auc}}.keras")]),
}
HARMLESS = {
    "every epoch": lambda d: C.ModelCheckpoint(f"{d}/{{epoch}}-{{val_loss:.2f}}.keras"),
    "best": lambda d: C.ModelCheckpoint(f"{d}/m.keras", save_best_only=True),
    "backup": lambda d: C.BackupAndRestore(f"{d}/backup"),
    "weights by orbax": lambda d: C.OrbaxCheckpoint(
        d, save_weights_only=True, save_on_background=False
    ),
    "lists": lambda d: C.CallbackList(
        [C.History(), C.ProgbarLogger()], verbose=0, epochs=1, steps=1
    ),
}


@pytest.mark.usefixtures("orbax")
@pytest.mark.parametrize("leak", LEAKS)
def test_training_metrics_in_files_are_refused(
    model: keras.Model, tmp_path: Path, leak: str
) -> None:
    with pytest.raises(PrivacyError, match="no epsilon covers them.\n.*non_private"):
        begin(model, LEAKS[leak](tmp_path))
    if leak != "a list in the list":  # which has to hold the report, too
        begin(model, LEAKS[leak](tmp_path), accepting())


@pytest.mark.usefixtures("orbax")
@pytest.mark.parametrize("callback", HARMLESS)
def test_others_begin(model: keras.Model, tmp_path: Path, callback: str) -> None:
    begin(model, HARMLESS[callback](tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_refuses(tmp_path: Path, loop: str) -> None:
    with pytest.raises(PrivacyError, match="no epsilon covers"):
        LOOPS[loop](compiled(), LEAKS["file name"](tmp_path))


# ----------------------------------------------------------------------------- what files hold


def saved_arrays(path: Path) -> list[np.ndarray]:
    """All that a file of Keras holds; a `.keras` archive by its member of weights."""
    if path.suffix == ".keras":
        zipfile.ZipFile(path).extract("model.weights.h5", path.parent)
        path = path.parent / "model.weights.h5"
    found: list[np.ndarray] = []
    with h5py.File(path) as file:
        file.visititems(
            lambda _, item: found.append(item[()]) if isinstance(item, h5py.Dataset) else None
        )
    return found


def metrics_of(model: keras.Model) -> list[np.ndarray]:
    """Variables that Keras sums training metrics up in, after a step no longer 0 all of them."""
    values = [variable.numpy() for variable in model.metrics_variables]
    return [value for value in values if np.any(value)]


def holds_metrics(arrays: list[np.ndarray], model: keras.Model) -> bool:
    return any(np.array_equal(a, m) and a.size > 1 for a in arrays for m in metrics_of(model)) or (
        any(np.array_equal(a, metrics_of(model)[0]) for a in arrays)  # the sum of losses
    )


class OwnMetric(keras.Model):
    """A model that keeps its metric, too."""

    def __init__(self) -> None:
        super().__init__()
        self.auc = keras.metrics.AUC()
        self.rows, self.flat = keras.layers.Embedding(V, 4), keras.layers.Flatten()
        self.top = keras.layers.Dense(1, activation="sigmoid")

    def call(self, ids: Any) -> Any:
        return self.top(self.flat(self.rows(ids)))


def own_metric() -> keras.Model:
    model = OwnMetric()
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan(), 1.0)
    model.compile(optimizer, "binary_crossentropy", metrics=[model.auc])
    model(data()[0])
    return model


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [compiled, own_metric])
def test_files_hold_no_metric(tmp_path: Path, make: Callable[[], keras.Model]) -> None:
    model = make()
    fit(
        model,
        C.ModelCheckpoint(tmp_path / "whole.keras"),
        C.ModelCheckpoint(tmp_path / "m.weights.h5", save_weights_only=True),
        C.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
    )
    assert holds_metrics([v.numpy() for v in model.metrics_variables], model)  # it can be told
    written = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert written == ["latest.weights.h5", "m.weights.h5", "training_metadata.json", "whole.keras"]
    for name in ("whole.keras", "m.weights.h5", "backup/latest.weights.h5"):
        arrays = saved_arrays(tmp_path / name)
        assert len(arrays) > 5 and not holds_metrics(arrays, model)
    metadata = (tmp_path / "backup/training_metadata.json").read_text()
    assert metadata == '{"epoch": 1, "batch": 0}'


@pytest.mark.parametrize("often", [(1, "epoch"), ("epoch", 2), (1, 2)])
def test_a_backup_and_weights_that_are_saved_at_other_steps(
    model: keras.Model, tmp_path: Path, often: tuple[Any, Any]
) -> None:
    """A killed run would take steps again whose weights are on the disk."""
    backup = C.BackupAndRestore(tmp_path / "backup", save_freq=often[1])
    saver = C.ModelCheckpoint(tmp_path / "m.keras", save_freq=often[0])
    with pytest.raises(PrivacyError, match="Expected ModelCheckpoint to save when Backup"):
        begin(model, saver, backup)


def test_a_backup_comes_before_weights_that_are_saved(model: keras.Model, tmp_path: Path) -> None:
    backup, saver = C.BackupAndRestore(tmp_path / "backup"), C.ModelCheckpoint(tmp_path / "m.keras")
    both = keras.callbacks.CallbackList([saver, backup], model=model)
    both.on_train_begin()
    order = [getattr(each, "inner", each) for each in both.callbacks]
    assert order.index(backup) < order.index(saver)


@pytest.mark.slow
def test_what_orbax_would_write(tmp_path: Path, orbax: mock.MagicMock) -> None:
    """So the rule is needed, and `save_weights_only` is enough."""
    save = orbax.training.Checkpointer.return_value.save_checkpointables
    for weights_only in (False, True):
        callback = C.OrbaxCheckpoint(
            tmp_path, save_weights_only=weights_only, save_on_background=False
        )
        fit(compiled(), callback, accepting())
        assert ("metrics_variables" in save.call_args.args[1]["pytree"]) == (not weights_only)


# --------------------------------------------------------------- names that pretend to be released


@pytest.mark.cases(1)
@pytest.mark.parametrize("loop", ["fit", "train"])
def test_a_training_metric_may_not_be_called_one_of_validation(loop: str) -> None:
    """Keras would hand it to early stopping as such, and the report would write it."""
    metric = keras.metrics.BinaryAccuracy(name="val_accuracy")
    with pytest.raises(PrivacyError, match="got 'val_accuracy'.*Rename the metric"):
        LOOPS[loop](compiled(metrics=[metric]), C.EarlyStopping("val_accuracy", mode="max"))


def test_nor_may_an_output() -> None:
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(V, 4)(ids))
    outputs = {n: keras.layers.Dense(1, name=n)(rows) for n in ("val_sales", "visits")}
    model = keras.Model(ids, outputs)
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan(), 1.0)
    model.compile(optimizer, dict.fromkeys(outputs, "mse"))
    x, y = data()
    batches = optimizer.plan.sampling.batches((x, dict.fromkeys(outputs, y)))
    with pytest.raises(PrivacyError, match="got 'val_sales_loss'"):
        model.fit(batches, steps_per_epoch=1, verbose=0)
