"""`PrivateCheckpoint`: killed anywhere a run goes on, and no step is published twice."""

import contextlib
import json
import pathlib
import random
import shutil
import signal
import tempfile
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError, PrivateCheckpoint
from dp_sparse.step.checkpointed_steps import checkpointed_steps_of
from dp_sparse.training.checkpoint_files import CheckpointFolder
from tests.sampling.offline_folders import prepared
from tests.subprocesses import run_python, start_python
from tests.training_cases import click_model, clicks, plan_for, weights_of


def compiled(plan: dp_sparse.PrivacyPlan, optimizer: Any = dp_sparse.DPAdaFESTOptimizer) -> Any:
    model = click_model()
    model.compile(optimizer=optimizer("sgd", plan, 1.0), loss="binary_crossentropy")
    return model


def run(
    folder: pathlib.Path | str,
    plan: dp_sparse.PrivacyPlan,
    steps: int | None = None,
    **options: Any,
) -> tuple[keras.Model, int]:
    """A process' part of a run; returns the model, and the steps spent when it began."""
    model = compiled(plan)
    checkpoint = PrivateCheckpoint(str(folder), **options)
    spent = checkpoint.restore(model)
    batches = plan.sampling.batches(clicks(8))
    model.fit(batches, steps_per_epoch=steps, callbacks=[checkpoint], verbose=0)
    checkpoint._folder._lock = None  # as when the process ends
    return model, spent


def plan_of(steps: int = 6) -> dp_sparse.PrivacyPlan:
    return plan_for(8, steps=steps, noise_multiplier=0.5)


def test_saves_by_steps_keeps_some_and_goes_on(tmp_path: pathlib.Path, new_process: Any) -> None:
    plan = plan_of(9)
    model, spent = run(tmp_path, plan, 5, every_steps=2, keep=2)
    assert spent == 0
    checkpoint = PrivateCheckpoint(str(tmp_path))
    assert checkpoint.steps == [4, 5]
    new_process()
    loaded = compiled(plan)
    assert checkpoint.restore(loaded) == 5
    for ours, theirs in zip(weights_of(loaded), weights_of(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert loaded.optimizer.steps_left == 4


def test_saves_by_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that does not jump."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    monkeypatch.setattr(time, "time", lambda: random.uniform(0, 1e9))
    run(tmp_path, plan_of(6), every_seconds=1.5, keep=9)
    assert PrivateCheckpoint(str(tmp_path)).steps == [2, 4, 6]


def test_each_epoch_is_saved_before_others_write(tmp_path: pathlib.Path) -> None:
    seen = []

    class Writer(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append((checkpoint.steps[-1], int(self.model.optimizer.steps_spent.numpy())))

    plan = plan_of(6)
    model, checkpoint = compiled(plan), PrivateCheckpoint(str(tmp_path))
    checkpoint.restore(model)
    batches = plan.sampling.batches(clicks(8))
    model.fit(batches, epochs=3, callbacks=[Writer(), checkpoint], verbose=0)
    assert seen == [(2, 2), (4, 4), (6, 6)]


def test_a_remote_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, new_process: Any
) -> None:
    """Weights that a killed process had not published yet are on this machine, and are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan, folder, save = plan_of(6), f"ram://{tmp_path.name}/run", keras.Model.save_weights

    def killed(model: keras.Model, path: str) -> None:
        save(model, path)
        own = pathlib.Path(path).parent
        shutil.copytree(own, f"{own}-left")  # as it stays behind
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keras.Model, "save_weights", killed)
        with pytest.raises(KeyboardInterrupt):
            run(folder, plan, 2)
    assert list(tmp_path.glob(".step-*-left/*.h5"))
    new_process()
    (tmp_path / ".step-of-another-run").mkdir()
    assert run(folder, plan, 3)[1] == 0
    assert [each.name for each in tmp_path.iterdir()] == [".step-of-another-run"]
    assert run(folder, plan, 3)[1] == 3
    assert PrivateCheckpoint(folder).steps == [3, 6]


class TestPublished:
    """What the folder says was published stays spent."""

    def begun(self, folder: pathlib.Path) -> dp_sparse.PrivacyPlan:
        plan = plan_of(9)
        run(folder, plan, 6, every_steps=2, keep=9)
        return plan

    def test_whichever_checkpoint_is_loaded(self, tmp_path: pathlib.Path, new_process: Any) -> None:
        plan = self.begun(tmp_path)
        for name in ("step-000000006.json", "step-000000004.weights.h5"):
            (tmp_path / name).unlink()
        new_process()
        model, checkpoint = compiled(plan), PrivateCheckpoint(str(tmp_path))
        with pytest.warns(UserWarning, match="left out") as told:
            assert checkpoint.restore(model) == 6
        said = [str(each.message) for each in told]
        assert "step-000000006.weights.h5 is left out: it was not written whole" in said[0]
        assert "step-000000004.weights.h5 is left out: a file of it is missing" in said[1]
        assert model.optimizer.steps_left == 3
        batches = plan.sampling.batches(clicks(8))
        model.fit(batches, callbacks=[checkpoint], verbose=0)
        assert checkpoint.steps[-1] == 9

    @pytest.mark.parametrize(("last", "weights_named"), [(2, False), (4, False), (4, True)])
    def test_before_its_files_have_their_names(
        self,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
        new_process: Any,
        last: int,
        weights_named: bool,
    ) -> None:
        """The process is gone in between: the step counts, and its weights are not lost."""
        plan, files = plan_of(9), checkpoint_files().CheckpointFolder
        published = files.publish

        def gone(self: Any, of: int, step: int) -> None:
            published(self, of, step)
            if step == last:
                if weights_named:
                    name = f"step-{step:09d}.weights.h5"
                    (tmp_path / f".{name}").rename(tmp_path / name)
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(files, "publish", gone)
            patched.setattr(files, "lock", lambda self: None)
            (tmp_path / "lock").touch()
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, plan, every_steps=2)
        new_process()
        model, checkpoint = compiled(plan), PrivateCheckpoint(str(tmp_path))
        assert checkpoint.restore(model) == last
        assert checkpoint.steps == list(range(2, last + 1, 2)) and model.optimizer.steps_left > 0
        assert not list(tmp_path.glob(".step*"))

    def test_weights_of_a_step_that_was_not_published_go(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, new_process: Any
    ) -> None:
        """The step runs again: beside the new weights, the old ones would tell twice of it."""
        plan = plan_of(9)

        def gone(self: Any, of: int, step: int) -> None:
            if step == 4:
                raise KeyboardInterrupt
            published(self, of, step)

        files = checkpoint_files().CheckpointFolder
        published = files.publish
        with monkeypatch.context() as patched:
            patched.setattr(files, "publish", gone)
            patched.setattr(files, "lock", lambda self: self.path and tmp_path.mkdir(exist_ok=True))
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, plan, every_steps=2)
        assert list(tmp_path.glob(".step-000000004*.h5"))
        (tmp_path / ".step-of_a_killed_process").mkdir()
        (tmp_path / ".step-of_a_killed_process" / "step-000000004.weights.h5").touch()
        new_process()
        model, checkpoint = compiled(plan), PrivateCheckpoint(str(tmp_path))
        assert checkpoint.restore(model) == 2
        assert not list(tmp_path.glob(".step*")) and checkpoint.steps == [2]

    @pytest.mark.parametrize("how", ["save", "save_weights", "export"])
    def test_before_the_model_writes_its_weights(
        self, tmp_path: pathlib.Path, new_process: Any, how: str
    ) -> None:
        """Also after a `fit` that was interrupted, whose steps no callback saved."""

        class Interrupt(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 2:
                    raise KeyboardInterrupt

        plan, folder = plan_of(9), tmp_path / "run"
        model, checkpoint = compiled(plan), PrivateCheckpoint(str(folder))
        checkpoint.restore(model)
        batches = plan.sampling.batches(clicks(8))
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches, callbacks=[checkpoint, Interrupt()], verbose=0)
        assert checkpoint.steps == []
        path = {"save": "m.keras", "save_weights": "m.weights.h5", "export": "m"}[how]
        getattr(model, how)(tmp_path / path)
        assert checkpoint.steps == [3]
        checkpoint._folder._lock = None
        new_process()
        assert PrivateCheckpoint(str(folder)).restore(compiled(plan)) == 3

    def test_nothing_that_is_whole(self, tmp_path: pathlib.Path) -> None:
        plan = self.begun(tmp_path)
        for path in tmp_path.glob("*.h5"):
            path.write_bytes(path.read_bytes()[:-7])
        with (
            pytest.warns(UserWarning, match="its weights are not those that were written"),
            pytest.raises(PrivacyError, match="got none that is whole"),
        ):
            PrivateCheckpoint(str(tmp_path)).restore(compiled(plan))

    def test_only_once_a_checkpoint_holds_it(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step whose checkpoint failed is saved before the model's weights are."""

        def full(*_: Any) -> None:
            raise OSError("No space left on device")

        plan = plan_of()
        model, checkpoint = compiled(plan), PrivateCheckpoint(str(tmp_path / "run"), every_steps=1)
        checkpoint.restore(model)
        batches = plan.sampling.batches(clicks(8))
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointFolder, "save", full)
            with pytest.raises(OSError, match="No space"):
                model.fit(batches, steps_per_epoch=1, callbacks=[checkpoint], verbose=0)
        assert checkpointed_steps_of(model.optimizer).step == 0
        model.save_weights(tmp_path / "m.weights.h5")
        assert checkpoint.steps == [1] and checkpointed_steps_of(model.optimizer).step == 1

    @pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"plan": 1}'])
    def test_lost_or_not_readable(self, tmp_path: pathlib.Path, content: str | None) -> None:
        plan = self.begun(tmp_path)
        path = tmp_path / "published.json"
        path.unlink() if content is None else path.write_text(content)
        words = "Expected .*published.json" if content is None else "published.json is damaged"
        with pytest.raises(PrivacyError, match=words):
            PrivateCheckpoint(str(tmp_path)).restore(compiled(plan))

    @pytest.mark.slow
    def test_of_another_plan(self, tmp_path: pathlib.Path) -> None:
        self.begun(tmp_path)
        other = plan_for(8, steps=9, noise_multiplier=0.6)
        with pytest.raises(PrivacyError, match="that of a plan with other sampling, noise"):
            PrivateCheckpoint(str(tmp_path)).restore(compiled(other))

    @pytest.mark.slow
    def test_a_checkpoint_of_another_run(self, tmp_path: pathlib.Path) -> None:
        plan = self.begun(tmp_path / "a")
        other = plan_for(8, steps=9, noise_multiplier=0.6)
        run(tmp_path / "b", other, 7)
        for end in ("json", "weights.h5"):
            name = f"step-000000007.{end}"
            (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
        model = compiled(plan)
        with pytest.warns(UserWarning, match="000007.weights.h5 is left out: it is of another run"):
            assert PrivateCheckpoint(str(tmp_path / "a")).restore(model) == 6

    def test_no_file_has_a_key(self, tmp_path: pathlib.Path) -> None:
        model, _ = run(tmp_path, plan_of(6))
        key = model.optimizer._account.noise_key._key.numpy().tobytes()
        assert not any(key in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


def checkpoint_files() -> Any:
    from dp_sparse.training import checkpoint_files

    return checkpoint_files


def test_goes_on_behind_what_was_published_in_an_ordered_run(
    tmp_path: pathlib.Path, new_process: Any
) -> None:
    """The batch of a lost step is left out, not used again."""
    prepared(tmp_path / "drawn", steps=7)
    source = dp_sparse.OfflineBatches(
        str(tmp_path / "drawn"), lambda fields: (fields["x"] % 7, fields["y"])
    )
    sampling = dp_sparse.offline_sampling(source)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).with_noise(2.0)

    def made() -> keras.Model:
        ids = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(7, 2)(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
        return model

    folder = tmp_path / "run"
    model, checkpoint = made(), PrivateCheckpoint(str(folder), every_steps=2)
    checkpoint.restore(model)
    batches = plan.sampling.batches(source)
    model.fit(batches, steps_per_epoch=4, callbacks=[checkpoint], verbose=0)
    (folder / "step-000000004.json").unlink()
    checkpoint._folder._lock = None
    new_process()
    model, checkpoint = made(), PrivateCheckpoint(str(folder))
    with pytest.warns(UserWarning, match="left out"):
        spent = checkpoint.restore(model)
    assert spent == 4
    batches = plan.sampling.batches(source, first_step=spent)
    model.fit(batches, callbacks=[checkpoint], verbose=0)
    assert model.optimizer.steps_left == 0


class TestRefused:
    def test_fit_before_restore(self, tmp_path: pathlib.Path) -> None:
        plan = plan_of()
        model = compiled(plan)
        batches = plan.sampling.batches(clicks(8))
        with pytest.raises(PrivacyError, match="Expected restore"):
            model.fit(batches, callbacks=[PrivateCheckpoint(str(tmp_path))], verbose=0)

    def test_a_model_without_privacy(self, tmp_path: pathlib.Path) -> None:
        model = click_model()
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="compiled with a private optimizer"):
            PrivateCheckpoint(str(tmp_path)).restore(model)

    def test_a_model_without_variables(self, tmp_path: pathlib.Path) -> None:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(dp_sparse.DPSGDOptimizer("sgd", plan_of(), 1.0), "mse")
        with pytest.raises(ValueError, match="Expected a built model"):
            PrivateCheckpoint(str(tmp_path)).restore(model)

    def test_two_processes_in_one_folder(self, tmp_path: pathlib.Path) -> None:
        plan = plan_of()
        first = PrivateCheckpoint(str(tmp_path))
        first.restore(compiled(plan))
        with pytest.raises(PrivacyError, match="Expected one process"):
            PrivateCheckpoint(str(tmp_path)).restore(compiled(plan))

    def test_two_under_two_names_of_one_folder(self, tmp_path: pathlib.Path) -> None:
        plan = plan_of()
        first = PrivateCheckpoint(f"file://{tmp_path}")
        first.restore(compiled(plan))
        with pytest.raises(PrivacyError, match="Expected one process"):
            PrivateCheckpoint(str(tmp_path)).restore(compiled(plan))

    def test_a_fit_without_it(self, tmp_path: pathlib.Path) -> None:
        """A report would tell of steps that run again after a kill."""
        plan = plan_of()
        model, checkpoint = compiled(plan), PrivateCheckpoint(str(tmp_path / "run"))
        checkpoint.restore(model)
        batches = plan.sampling.batches(clicks(8))
        report = dp_sparse.PrivacyReport(tmp_path / "report.html")
        with pytest.raises(PrivacyError, match="Expected the PrivateCheckpoint that restored"):
            model.fit(batches, callbacks=[report], verbose=0)
        assert int(model.optimizer.steps_spent.numpy()) == 0
        assert not (tmp_path / "report.html").exists()

    def test_a_second_one_of_the_same_run(self, tmp_path: pathlib.Path) -> None:
        """It would publish what the first one does not count."""
        model = compiled(plan_of())
        first = PrivateCheckpoint(str(tmp_path / "a"))
        first.restore(model)
        with pytest.raises(PrivacyError, match="Expected one PrivateCheckpoint for the optimizer"):
            PrivateCheckpoint(str(tmp_path / "b")).restore(model)
        assert first.restore(model) == 0 and not (tmp_path / "b").exists()

    @pytest.mark.parametrize(
        "kind", ["ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint", "PrivateCheckpoint"]
    )
    def test_another_that_saves(self, tmp_path: pathlib.Path, kind: str) -> None:
        plan = plan_of()
        model, checkpoint = compiled(plan), PrivateCheckpoint(str(tmp_path))
        checkpoint.restore(model)
        other = {
            "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"),
            "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore(tmp_path / "b"),
            "OrbaxCheckpoint": lambda: object.__new__(keras.callbacks.OrbaxCheckpoint),
            "PrivateCheckpoint": lambda: PrivateCheckpoint(str(tmp_path / "c")),
        }[kind]()
        batches = plan.sampling.batches(clicks(8))
        with pytest.raises(PrivacyError, match=f"got {kind} beside it"):
            model.fit(batches, callbacks=[other, checkpoint], verbose=0)

    @pytest.mark.parametrize(
        "options", [{"every_steps": 0}, {"every_seconds": -1.0}, {"keep": 0}, {"keep": 1.5}]
    )
    def test_numbers_out_of_range(self, tmp_path: pathlib.Path, options: Any) -> None:
        with pytest.raises(ValueError, match=f"Expected {next(iter(options))}"):
            PrivateCheckpoint(str(tmp_path), **options)


# ---- Real processes.

RUN = """
    import dataclasses, json, pathlib, sys, time
    import keras
    import dp_sparse
    from tests.training_cases import click_model, clicks

    folder = pathlib.Path(sys.argv[1])
    sampling = dp_sparse.PoissonSampling(num_examples=8, expected_batch_size=8, steps=60)
    plan = dataclasses.replace(
        dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling),
        noise_multiplier=5.0, plan_id="the same plan in all processes",
    )
    model = click_model()
    model.compile(optimizer=dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    checkpoint = dp_sparse.PrivateCheckpoint(str(folder), every_steps=3)
    monitor = dp_sparse.PrivacyMonitor(str(folder / "log"), every_steps=2)
    spent = checkpoint.restore(model)
    published = json.loads((folder / "published.json").read_text())["published"]

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done = int(self.model.optimizer.steps_spent.numpy())
            print(json.dumps({"done": done, "checkpoints": checkpoint.steps}), flush=True)
            time.sleep(0.02)

    print(json.dumps({"spent": spent, "published": published}), flush=True)
    callbacks = [checkpoint, monitor, Tell()]
    model.fit(plan.sampling.batches(clicks(8)), callbacks=callbacks, verbose=0)
    print(json.dumps({"ended": int(model.optimizer.steps_spent.numpy())}), flush=True)
"""


def lines_until(process: Any, steps: int) -> list[dict[str, Any]]:
    """What a process prints until so many steps of its own were done, or it ended."""
    lines = []
    for line in process.stdout:
        lines.append(json.loads(line))
        if sum("done" in each for each in lines) >= steps:
            break
    return lines


def logged(folder: pathlib.Path) -> list[int]:
    """The steps of the log, which its events have, too, but perhaps for the last one."""
    path = folder / "log" / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    events = []
    for name in sorted((folder / "log").glob("events.*")):
        with contextlib.suppress(tf.errors.DataLossError):  # of an event that was cut off
            events += [e.step for e in tf.compat.v1.train.summary_iterator(str(name)) if e.step]
    assert set(events) <= set(steps) and len(events) == len(set(events))
    return steps


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: pathlib.Path) -> None:
    """At random moments: each process goes on behind what was published, and the last one ends.

    No step that the log has a line of is drawn once more.
    """
    rng = random.Random()
    highest, lines_of_log = 0, []
    for _ in range(20):
        process = start_python(RUN, str(tmp_path))
        lines = lines_until(process, rng.randint(0, 4))
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        lines += [json.loads(line) for line in process.stdout if line.endswith("\n")]
        process.wait()
        begun = lines[:1]
        if begun:
            assert begun[0]["spent"] == begun[0]["published"] >= highest
            highest = begun[0]["published"]
            assert max(lines_of_log, default=0) <= begun[0]["spent"]
        lines_of_log = logged(tmp_path)
        for line in lines[1:]:
            assert line.get("done", 0) <= 60
    lines = [json.loads(line) for line in run_python(RUN, str(tmp_path)).splitlines()]
    assert lines[0]["spent"] >= highest
    assert lines[-1] == {"ended": 60}
    assert [line["done"] for line in lines if "done" in line] == list(
        range(lines[0]["spent"] + 1, 61)
    )
    assert json.loads((tmp_path / "published.json").read_text())["published"] == 60
    steps = logged(tmp_path)
    assert steps == sorted(set(steps)) and steps[-1] == 60
    behind = [step for step in steps if step > lines[0]["spent"]]
    first = lines[0]["spent"] // 2 * 2 + 2
    assert max(lines_of_log, default=0) <= lines[0]["spent"]
    assert behind == list(range(first, 61, 2))
    last = json.loads((tmp_path / "log" / "log.jsonl").read_text().splitlines()[-1])
    sampling = dp_sparse.PoissonSampling(num_examples=8, expected_batch_size=8, steps=60)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling)
    assert last["epsilon"] == plan.with_noise(5.0).budget.epsilon  # of an undisturbed run


def test_sigterm_saves_and_exits_143(tmp_path: pathlib.Path) -> None:
    process = start_python(RUN, str(tmp_path))
    lines = lines_until(process, 4)
    process.send_signal(signal.SIGTERM)
    lines += [json.loads(line) for line in process.stdout]
    assert process.wait() == 143
    last = max(line["done"] for line in lines if "done" in line)
    saved = PrivateCheckpoint(str(tmp_path)).steps[-1]
    assert saved >= last
    assert logged(tmp_path) == list(range(2, saved + 1, 2))
    assert not any("ended" in line for line in lines)
