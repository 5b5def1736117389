"""An export publishes its steps: a run that is killed after it does not draw them again."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import pytest

import dp_sparse
from dp_sparse import PrivateCheckpoint
from dp_sparse.export import full, keras_folder
from dp_sparse.training.checkpoint_files import CheckpointFolder
from tests.export import exported
from tests.subprocesses import run_python, start_python


def published(folder: pathlib.Path) -> int:
    found: int = json.loads((folder / "run" / "published.json").read_text())["published"]
    return found


class ExportAt(keras.callbacks.Callback):
    """Exports after a step, when no checkpoint is due."""

    def __init__(self, folder: pathlib.Path, step: int, base: pathlib.Path | None = None) -> None:
        super().__init__()
        self.folder, self.step, self.base = folder, step, base

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == self.step:
            path = self.folder / "export"
            if self.base is None:
                dp_sparse.export_model(self.model, path)
            else:
                dp_sparse.export_delta(self.model, path, base=self.base)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_checkpoint_covers_an_export_before_anybody_sees_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = exported.compiled(exported.click_model())
    checkpoint = PrivateCheckpoint(str(tmp_path / "run"))
    assert checkpoint.restore(model) == 0
    base = None if kind == "full" else tmp_path / "base"
    if base is not None:
        dp_sparse.export_model(model, base)
    assert published(tmp_path) == 0
    record = CheckpointFolder.publish

    def publish(self: Any, plan: int, step: int) -> None:
        assert step > 2 or not (tmp_path / "export").exists()
        record(self, plan, step)

    monkeypatch.setattr(CheckpointFolder, "publish", publish)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            there = (tmp_path / "export").exists()
            seen.append((published(tmp_path), there, list(checkpoint.steps)))

    exported.train(model, 3, [ExportAt(tmp_path, 2, base), Look(), checkpoint])
    assert seen == [(0, False, []), (2, True, [2]), (2, True, [2])]


def test_what_cannot_be_recorded_is_not_exported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exported.compiled(exported.click_model())
    PrivateCheckpoint(str(tmp_path / "run")).restore(model)
    model.optimizer.count_spent(1)

    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(CheckpointFolder, "publish", full_disk)
    for write in (
        lambda: dp_sparse.export_model(model, tmp_path / "export"),
        lambda: full.written(model, model.optimizer, tmp_path / "export", None, None),
    ):
        with pytest.raises(OSError, match="no space"):
            write()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["export", "delta", "save", "save_weights", "checkpoint"])
def test_what_another_thread_trains_meanwhile_is_not_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The weights would hold a step that the statement, or the count beside them, does not."""
    model = exported.trained(steps=0)
    checkpoint = PrivateCheckpoint(str(tmp_path / "run"))
    checkpoint.restore(model)
    if kind == "delta":
        dp_sparse.export_model(model, tmp_path / "base")
    model.optimizer.count_spent(1)
    write: dict[str, tuple[Any, str, Callable[[], Any]]] = {
        "export": (
            keras_folder,
            "layout",
            lambda: dp_sparse.export_model(model, tmp_path / "new"),
        ),
        "delta": (
            keras_folder,
            "layout",
            lambda: dp_sparse.export_delta(model, tmp_path / "new", tmp_path / "base"),
        ),
        "save": (model.layers[-1], SAVES, lambda: model.save(tmp_path / "m.keras")),
        "save_weights": (
            model.layers[-1],
            SAVES,
            lambda: model.save_weights(tmp_path / "m.weights.h5"),
        ),
        "checkpoint": (CheckpointFolder, "save", lambda: checkpoint.on_epoch_end(0)),
    }
    owner, name, written = write[kind]
    if kind in ("save", "save_weights"):
        checkpoint.on_epoch_end(0)
    before = getattr(owner, name)

    def amid_steps(*arguments: Any) -> Any:
        model.optimizer.count_spent(2)
        return before(*arguments)

    monkeypatch.setattr(owner, name, amid_steps)
    with pytest.raises(dp_sparse.PrivacyError, match="Steps were taken while"):
        written()
    assert not (tmp_path / "new").exists()
    assert published(tmp_path) == (0 if kind == "checkpoint" else 1)
    assert checkpoint.steps == ([] if kind == "checkpoint" else [1])


SAVES = "save_own_variables"


def interrupted(model: keras.Model, checkpoint: PrivateCheckpoint) -> None:
    """One step, which is not saved."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exported.train(model, 1, [checkpoint, Interrupt()])


def test_steps_that_no_callback_saved_are_saved_by_an_export(tmp_path: pathlib.Path) -> None:
    """Of an interrupted `fit`, between two that ended."""
    model = exported.compiled(exported.click_model())
    checkpoint = PrivateCheckpoint(str(tmp_path / "run"))
    checkpoint.restore(model)
    exported.train(model, 2, [checkpoint])
    interrupted(model, checkpoint)
    assert published(tmp_path) == 2
    dp_sparse.export_model(model, tmp_path / "export")
    assert published(tmp_path) == 3 and checkpoint.steps == [2, 3]
    exported.train(model, 1, [checkpoint])
    assert checkpoint.steps == [2, 3, 4]


def test_steps_that_no_callback_saved_are_saved_before_the_next_run(tmp_path: pathlib.Path) -> None:
    """As soon as it could export them."""
    model = exported.compiled(exported.click_model())
    checkpoint = PrivateCheckpoint(str(tmp_path / "run"))
    checkpoint.restore(model)
    interrupted(model, checkpoint)

    class ExportFirst(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            assert published(tmp_path) == 0
            dp_sparse.export_model(self.model, tmp_path / "export")
            assert published(tmp_path) == 1

    exported.train(model, 1, [checkpoint, ExportFirst()])
    assert published(tmp_path) == 2


RUN = """
    import dataclasses, json, pathlib, sys, time
    import keras
    import dp_sparse
    from tests.training_cases import click_model, clicks

    folder = pathlib.Path(sys.argv[1])
    sampling = dp_sparse.PoissonSampling(num_examples=8, expected_batch_size=8, steps=20)
    plan = dataclasses.replace(
        dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling),
        noise_multiplier=0.5, plan_id="the same plan in all processes",
    )
    model = click_model()
    model.compile(optimizer=dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    checkpoint = dp_sparse.PrivateCheckpoint(str(folder / "run"))
    print(json.dumps({"spent": checkpoint.restore(model)}), flush=True)

    class Export(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.steps_spent.numpy())
            if step % 4 == 0:
                dp_sparse.export_model(self.model, folder / f"export_{step}")
            print(json.dumps({"done": step}), flush=True)

    model.fit(plan.sampling.batches(clicks(8)), callbacks=[checkpoint, Export()], verbose=0)
"""


@pytest.mark.slow
def test_killed_between_exports(tmp_path: pathlib.Path) -> None:
    """Each process goes on behind the last export; what stands there is whole."""
    for wait in (5, 8):
        process = start_python(RUN, str(tmp_path))
        lines = []
        for line in process.stdout or ():
            lines.append(json.loads(line))
            if len(lines) > wait:
                break
        before = [int(p.name.split("_")[1]) for p in tmp_path.glob("export_*")]
        process.kill()
        lines += [json.loads(line) for line in process.stdout or () if line.endswith("\n")]
        process.wait()
        seen = [int(p.name.split("_")[1]) for p in tmp_path.glob("export_*")]
        assert published(tmp_path) >= max(seen) and set(before) <= set(seen)
        assert lines[0]["spent"] >= max([0, *(step for step in before if step < lines[1]["done"])])
    run_python(RUN, str(tmp_path))
    exports = sorted(tmp_path.glob("export_*"))
    assert len(exports) == 5 and published(tmp_path) == 20
    for path in exports:
        assert dp_sparse.check_export(path).steps == int(path.name.split("_")[1])
