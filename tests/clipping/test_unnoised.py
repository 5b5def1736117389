"""Statistics of training that no noise protects: in no file of weights, and in no update."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import pytest
import tensorflow as tf

from dp_sparse import DPSGDOptimizer
from dp_sparse.clipping.non_private_statistics import register_statistics
from dp_sparse.core.errors import PrivacyError
from tests.clipping.guarded_steps import SIZE, features, model_with, updating
from tests.training_cases import marked_dataset, plan_for


class Wide(keras.metrics.Metric):
    """A statistic of a shape that nothing else has."""

    def __init__(self) -> None:
        super().__init__(name="wide")
        self.total = self.add_variable((17,), initializer="zeros", name="total")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.fill([17], tf.reduce_sum(tf.cast(y, tf.float32))))

    def result(self) -> Any:
        return self.total[0]


class Measures(keras.Model):
    """Holds a metric itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.own = keras.layers.Dense(1), Wide()

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [Measures, lambda: model_with(keras.layers.Dense(2))])
def test_no_file_of_weights_has_a_metric(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    model, plan = make(), plan_for(SIZE)
    model(features()[0])
    model.compile(DPSGDOptimizer("sgd", plan, 1.0), loss="mse", metrics=[Wide()])
    callbacks = [
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(tmp_path / "checkpoint.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(tmp_path / "checkpoint.keras"),
    ]
    batches = marked_dataset(plan, *features(), steps=1)
    model.fit(batches, verbose=0, callbacks=callbacks)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".h5", ".keras")]
    assert len(files) == 5
    for path in files:
        assert (17,) not in shapes(path, tmp_path), path
    saved = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    model.export(tmp_path / "export", verbose=False)
    for prefix in (saved, str(tmp_path / "export" / "variables" / "variables")):
        names = tf.train.list_variables(prefix)
        assert names and not [name for name, shape in names if shape == [17]]
    assert [17] in [list(v.shape) for v in model.metrics_variables]


def shapes(path: Path, folder: Path) -> list[tuple[int, ...]]:
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            path = Path(archive.extract("model.weights.h5", folder / "extracted"))
    found: list[tuple[int, ...]] = []
    with h5py.File(path) as file:
        file.visititems(lambda _, entry: found.append(getattr(entry, "shape", ())))
    assert len(found) > 4
    return found


def test_an_update_names_the_statistic_that_it_reads() -> None:
    model, metric = model_with(keras.layers.Dense(2)), Wide()
    model.compile("sgd", loss="mse", metrics=[metric])
    model.fit(*features(), verbose=0)
    register_statistics(model, DPSGDOptimizer("sgd", plan_for(SIZE), 1.0))
    with pytest.raises(PrivacyError, match=r"reads wide.*, a statistic of training without noise"):
        updating(lambda allowed, other, weights: weights * metric.result())
