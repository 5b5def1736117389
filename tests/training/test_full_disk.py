"""A disk that gets full: what was there stays, and what comes after has room goes on."""

import pathlib
from collections.abc import Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf

import dp_sparse
from tests.export import exported
from tests.full_disk import SmallDisk, small_disk
from tests.training_cases import clicks, plan_for

ROOM = 1 << 26


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", ROOM) as made:
        yield made


def large_model(plan: dp_sparse.PrivacyPlan) -> keras.Model:
    """Whose weights are some 400 kB."""
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Embedding(6_000, 16)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    return model


class FillsUp(keras.callbacks.Callback):
    """From a step on, there is no room."""

    def __init__(self, disk: SmallDisk, at: int, left: int) -> None:
        super().__init__()
        self.disk, self.at, self.left = disk, at, left

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self.at:
            used = sum(each.stat().st_blocks * 512 for each in self.disk.path.rglob("*"))
            self.disk.resize(used + self.left)


def run(folder: pathlib.Path, plan: dp_sparse.PrivacyPlan, *callbacks: Any) -> int:
    """A process' part of a run; returns the steps spent when it began."""
    model = large_model(plan)
    checkpoint = dp_sparse.PrivateCheckpoint(str(folder / "run"), every_steps=2)
    monitor = dp_sparse.PrivacyMonitor(str(folder / "log"), every_steps=1)
    spent = checkpoint.restore(model)
    batches = plan.sampling.batches(clicks(8))
    try:
        model.fit(batches, callbacks=[checkpoint, monitor, *callbacks], verbose=0)
    finally:
        checkpoint._folder._lock = None  # as when the process ends
    return spent


SLOW = [pytest.param(left, marks=pytest.mark.slow) for left in (0, 8_192)]


@pytest.mark.parametrize("left", [*SLOW, 200_000, 600_000])
def test_a_run_goes_on_from_its_last_checkpoint(
    disk: SmallDisk, new_process: Any, left: int
) -> None:
    """With so many bytes left, a file, weights or half of them may be written."""
    plan = plan_for(8, steps=8, noise_multiplier=0.5)
    with pytest.raises((OSError, tf.errors.OpError), match=r"(?i)space|exhausted|write"):
        run(disk.path, plan, FillsUp(disk, 5, left))
    disk.resize(ROOM)
    new_process()
    kept = dp_sparse.PrivateCheckpoint(str(disk.path / "run")).steps
    assert kept[-1] in (4, 6)
    assert run(disk.path, plan) == kept[-1]
    assert dp_sparse.PrivateCheckpoint(str(disk.path / "run")).steps[-1] == 8
    lines = (disk.path / "log" / "log.jsonl").read_text().splitlines()
    assert [int(line.split('"step": ')[1].split(",")[0]) for line in lines] == list(range(1, 9))


def test_an_export_is_whole_or_not_there(disk: SmallDisk) -> None:
    model = exported.trained("dpsgd", exported.MODELS["clicks"], 1)
    disk.resize(1 << 14)
    with pytest.raises((OSError, tf.errors.OpError)):
        dp_sparse.export_model(model, disk.path / "export")
    assert disk.names() == []
    disk.resize(ROOM)
    dp_sparse.export_model(model, disk.path / "export")
    dp_sparse.check_export(disk.path / "export")
