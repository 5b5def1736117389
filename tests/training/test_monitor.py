"""`PrivacyMonitor`: its numbers, that it says nothing which no ε covers, and when it says it."""

import json
import math
import pathlib
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import PrivacyError, PrivacyMonitor, PrivateCheckpoint
from dp_sparse.reports.run_diagnosis import EpsilonPoints
from tests.training_cases import click_model, clicks, plan_for

N = 40
PUBLIC = {"step", "epsilon", "epsilon_of_all_steps", "delta", "expected_examples"}
OF_TABLES = {"survivors", "expected_false_rows", "gradient_size"}
NON_PRIVATE = {
    "time",
    "mean_batch_size",
    "clip_fraction",
    "quarantined_examples",
    "steps_per_second",
    "expected_examples_per_second",
    "metrics",
}
TABLES = ("embedding/embeddings", "embedding_1/embeddings")


@pytest.fixture(autouse=True)
def same_names() -> None:
    keras.backend.clear_session()


def plan_of(steps: int = 6) -> dp_sparse.PrivacyPlan:
    return plan_for(N, expected_batch_size=10, steps=steps, noise_multiplier=2.0)


def compiled(plan: dp_sparse.PrivacyPlan, kind: str = "DPAdaFEST", **options: Any) -> keras.Model:
    model = click_model()
    compiling = {k: options.pop(k) for k in ("jit_compile", "steps_per_execution") if k in options}
    optimizer = getattr(dp_sparse, f"{kind}Optimizer")("sgd", plan, 1.0, **options)
    model.compile(optimizer, loss="binary_crossentropy", metrics=["accuracy"], **compiling)
    return model


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> None:
    batches = model.optimizer.plan.sampling.batches(clicks(N))
    model.fit(batches, callbacks=list(callbacks), verbose=0, **options)


def lines_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events_of(folder: pathlib.Path) -> list[Any]:
    paths = sorted(folder.glob("events.out.tfevents.*"))
    return [e for path in paths for e in tf.compat.v1.train.summary_iterator(str(path))]


def scalars_of(folder: pathlib.Path) -> dict[int, dict[str, float]]:
    """By step and tag, read by TensorFlow; no tag of a step is there twice."""
    found: dict[int, dict[str, float]] = {}
    for event in events_of(folder):
        for value in event.summary.value:
            assert value.tag not in found.setdefault(event.step, {})
            found[event.step][value.tag] = value.simple_value
    return found


class Rows(keras.callbacks.Callback):
    """The totals of rows after each step, from the optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = {0: np.zeros(2)}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        self.totals[int(optimizer.steps_spent.numpy())] = optimizer.diagnostics.rows.numpy()


# -------------------------------------------------------------------------------------- numbers


def test_lines_and_scalars_hold_the_known_numbers(tmp_path: pathlib.Path) -> None:
    plan, rows = plan_of(5), Rows()
    model = compiled(plan)
    fit(model, PrivacyMonitor(str(tmp_path), every_steps=2), rows)
    lines, scalars = lines_of(tmp_path), scalars_of(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 5] == list(scalars)
    before = 0
    for line in lines:
        step = line["step"]
        seen = scalars[step]
        assert set(line) == PUBLIC | OF_TABLES
        assert line["epsilon"] == plan.spent(step).epsilon == pytest.approx(seen["epsilon"])
        assert line["epsilon_of_all_steps"] == plan.spent(5).epsilon  # whatever stopped the run
        assert line["delta"] == plan.budget.delta == pytest.approx(seen["delta"])
        assert line["expected_examples"] == 10 * step == seen["expected_examples"]
        means = (rows.totals[step] - rows.totals[before]) / (step - before)
        for index, path in enumerate(TABLES):
            false = model.optimizer.false_rows_per_step[index]
            known = {
                "survivors": means[index],
                "gradient_size": 3 * means[index],
                "expected_false_rows": false,
            }
            for name, value in known.items():
                assert line[name][path] == value == pytest.approx(seen[f"{name}/{path}"])
        assert len(seen) == 4 + 3 * len(TABLES)
        before = step
    assert sum(rows.totals[5]) > 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "of_tables"),
    [("DPSGD", {"gradient_size": [33.0, 21.0]}), ("LazyDPSGD", {})],
)
def test_optimizers_that_choose_no_rows(
    tmp_path: pathlib.Path, kind: str, of_tables: dict[str, list[float]]
) -> None:
    """Of LazyDP nothing is told of tables: whose rows it noised in a step is not released."""
    fit(compiled(plan_of(2), kind), PrivacyMonitor(str(tmp_path), every_steps=2))
    (line,) = lines_of(tmp_path)
    assert {n: list(v.values()) for n, v in line.items() if n not in PUBLIC} == of_tables


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"steps_per_execution": 3}, [3, 6, 7]),
        ({"jit_compile": True}, [2, 4, 6, 7]),
    ],
)
def test_other_ways_to_run_steps(
    tmp_path: pathlib.Path, options: dict[str, Any], steps: list[int]
) -> None:
    model = compiled(plan_of(7), **options)
    fit(model, PrivacyMonitor(str(tmp_path), every_steps=2))
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == steps
    gaps = np.diff([0, *steps])
    for index, path in enumerate(TABLES):
        told = np.dot([line["survivors"][path] for line in lines], gaps)
        assert told == pytest.approx(model.optimizer.diagnostics.rows.numpy()[index])


def test_on_two_replicas(tmp_path: pathlib.Path) -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = compiled(plan_of(4))
    fit(model, PrivacyMonitor(str(tmp_path), every_steps=2, diagnostics="non_private"))
    lines = [line for line in lines_of(tmp_path) if "survivors" in line]
    assert [line["step"] for line in lines] == [2, 4]
    told = sum(2 * sum(line["survivors"].values()) for line in lines)
    assert told == pytest.approx(model.optimizer.diagnostics.rows.numpy().sum())
    sizes = sum(2 * line["non_private"]["mean_batch_size"] for line in lines)
    assert sizes == int(model.optimizer.diagnostics.examples)


def test_epsilon_is_of_few_more_steps_for_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = plan_for(1000, steps=20_000, noise_multiplier=1.0), []

    def spent(self: Any, steps: int) -> dp_sparse.PrivacyBudget:
        asked.append(steps)
        return dp_sparse.PrivacyBudget(float(steps), 1e-5)

    monkeypatch.setattr(dp_sparse.PrivacyPlan, "spent", spent)
    points = EpsilonPoints(plan, 100)
    told = {step: points.at_least(step) for step in range(100, 20_001, 100)}
    assert all(step <= epsilon <= max(1.1 * step, step + 100) for step, epsilon in told.items())
    assert told[100] == 100.0 and told[20_000] == 20_000.0
    assert len(asked) == len(set(asked)) < 10 * math.log(200) + 15
    later = EpsilonPoints(plan, 100)  # as in a process that goes on
    assert {step: later.at_least(step) for step in told if step > 7000} == {
        step: epsilon for step, epsilon in told.items() if step > 7000
    }


def test_a_plan_without_epsilon_has_none(tmp_path: pathlib.Path) -> None:
    plan = dp_sparse.not_private_plan(plan_of(2), seed=1).with_noise(1.0)
    fit(compiled(plan), PrivacyMonitor(str(tmp_path), every_steps=1))
    assert [line["epsilon"] for line in lines_of(tmp_path)] == [None, None]
    assert all("epsilon" not in scalars for scalars in scalars_of(tmp_path).values())


# ------------------------------------------------------------------------- what no ε covers


def test_nothing_that_no_epsilon_covers(tmp_path: pathlib.Path) -> None:
    """No name but the known ones, no time and no name of a machine, in any file."""
    begun = time.time()
    monitor = PrivacyMonitor(str(tmp_path), every_steps=1)
    fit(compiled(plan_of(4)), monitor, epochs=2, validation_data=clicks(N))
    for line in lines_of(tmp_path):
        assert set(line) in (PUBLIC | OF_TABLES, {"step", "validation"})
        assert set(line.get("validation", ())) <= {"val_loss", "val_accuracy"}
    tags = {tag for scalars in scalars_of(tmp_path).values() for tag in scalars}
    assert tags == {
        *(PUBLIC - {"step"}),
        *(f"{name}/{path}" for name in OF_TABLES for path in TABLES),
        "validation/val_loss",
        "validation/val_accuracy",
    }
    assert all(event.wall_time <= 4 < begun for event in events_of(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"events.out.tfevents.{1:012d}", "lock", "log.jsonl"]


@pytest.mark.slow
def test_two_runs_that_differ_in_their_batches_alone_have_the_same_lines(
    tmp_path: pathlib.Path,
) -> None:
    """Losses, sizes of batches and times differ, and no line knows of them."""
    seen = []
    for run in ("a", "b"):
        keras.backend.clear_session()
        fit(compiled(plan_of(4), "DPSGD"), PrivacyMonitor(str(tmp_path / run), every_steps=2))
        files = sorted((tmp_path / run).iterdir())
        seen.append([(path.name, path.read_bytes()) for path in files])
    assert seen[0] == seen[1]


def test_with_diagnostics_what_no_epsilon_covers_has_that_name(tmp_path: pathlib.Path) -> None:
    model = compiled(plan_of(4))
    monitor = PrivacyMonitor(str(tmp_path), every_steps=2, diagnostics="non_private")

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.2)  # is no part of a step

    history = model.fit(
        monitor.timed(_slow(model.optimizer.plan.sampling.batches(clicks(N)), 0.1)),
        callbacks=[monitor, Slow()],
        verbose=0,
    )
    *lines, last = lines_of(tmp_path)
    counts = model.optimizer.diagnostics
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert set(line) == PUBLIC | OF_TABLES | {"non_private"}
        own = line["non_private"]
        assert set(own) == NON_PRIVATE | {"input_wait_share"}
        assert set(own["metrics"]) == {"loss", "accuracy"}
        assert abs(own["time"] - time.time()) < 600
        seconds = 1 / own["steps_per_second"]
        assert own["expected_examples_per_second"] == pytest.approx(10 / seconds)
        assert 0.1 <= own["input_wait_share"] * seconds < 0.19  # a slow batch, not a slow callback
    sizes = [line["non_private"]["mean_batch_size"] for line in lines]
    assert 2 * sum(sizes) == int(counts.examples)
    clipped = [
        2 * n * line["non_private"]["clip_fraction"] for n, line in zip(sizes, lines, strict=True)
    ]
    assert sum(clipped) == pytest.approx(int(counts.clipped))
    assert set(last) == {"step", "non_private"} and last["step"] == 4
    assert last["non_private"]["epoch_metrics"]["loss"] == history.history["loss"][0]
    scalars = scalars_of(tmp_path)[4]
    assert scalars["non_private/metrics/loss"] == pytest.approx(history.history["loss"][0])
    assert {tag.split("/")[0] for tag in scalars} == (PUBLIC - {"step"}) | OF_TABLES | {
        "non_private"
    }


def _slow(batches: tf.data.Dataset, seconds: float) -> tf.data.Dataset:
    def slow(x: Any, y: Any, weights: Any) -> Any:
        until = tf.timestamp() + seconds
        waited = tf.while_loop(lambda now: now < until, lambda _: tf.timestamp(), [until - seconds])
        with tf.control_dependencies(tf.nest.flatten(waited)):
            return tf.identity(x), y, weights

    return batches.map(slow)


@pytest.mark.slow
def test_what_is_not_finite_is_no_number_of_json(tmp_path: pathlib.Path) -> None:
    class Broken(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["val_broken"] = math.nan

    fit(compiled(plan_of(2)), Broken(), PrivacyMonitor(str(tmp_path)))
    assert lines_of(tmp_path)[0] == {"step": 2, "validation": {"val_broken": None}}
    assert "NaN" not in (tmp_path / "log.jsonl").read_text()


# ------------------------------------------------------------------------------- when it is seen


class Seen(keras.callbacks.Callback):
    """After each step: the steps of the log, and what the checkpoints hold."""

    def __init__(self, log: pathlib.Path, checkpoint: PrivateCheckpoint) -> None:
        super().__init__()
        self._log, self._checkpoint = log, checkpoint
        self.lines: list[tuple[list[int], int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = [line["step"] for line in lines_of(self._log)]
        self.lines.append((steps, max(self._checkpoint.steps, default=0)))


def test_lines_wait_for_the_checkpoint_that_covers_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, order = plan_of(7), []
    model = compiled(plan)
    checkpoint = PrivateCheckpoint(str(tmp_path / "run"), every_steps=3, keep=9)
    monitor = PrivacyMonitor(str(tmp_path / "log"), every_steps=1)
    checkpoint.restore(model)
    _noting(monkeypatch, order)
    seen = Seen(tmp_path / "log", checkpoint)
    fit(model, monitor, seen, checkpoint)
    held = [0, 0, 3, 3, 3, 6, 6]
    assert seen.lines == [(list(range(1, step + 1)), step) for step in held]
    assert [line["step"] for line in lines_of(tmp_path / "log")] == [1, 2, 3, 4, 5, 6, 7]
    assert order == [
        *("published 3", "named 3", "line 1", "line 2", "line 3"),
        *("published 6", "named 6", "line 4", "line 5", "line 6"),
        *("published 7", "named 7", "line 7"),
    ]


def _noting(monkeypatch: pytest.MonkeyPatch, order: list[str]) -> None:
    """Notes what gets on the disk, in the order in which it is there."""
    from dp_sparse.reports import monitor
    from dp_sparse.training import checkpoint_files

    def noting(owner: Any, name: str, note: Any) -> None:
        original = getattr(owner, name)

        def call(self: Any, *given: Any) -> Any:
            result = original(self, *given)
            order.extend(filter(None, [note(*given)]))
            return result

        monkeypatch.setattr(owner, name, call)

    folder = checkpoint_files.CheckpointFolder
    noting(folder, "publish", lambda plan, step: f"published {step}")
    noting(folder, "_name", lambda n: f"named {int(n[5:14])}" if n[:5] == "step-" else None)
    noting(monitor.LogFolder, "write", lambda line, when: f"line {line['step']}")


def test_goes_on_behind_the_restored_step(tmp_path: pathlib.Path, new_process: Any) -> None:
    """Lines of steps that no checkpoint held were never written."""
    plan = plan_of(8)
    for stop in (5, None):
        model = compiled(plan)
        checkpoint = PrivateCheckpoint(str(tmp_path / "run"), every_steps=2)
        monitor = PrivacyMonitor(str(tmp_path / "log"), every_steps=1)
        spent = checkpoint.restore(model)
        killed = Killed(stop or 100)
        try:
            fit(model, checkpoint, monitor, killed)
        except KeyboardInterrupt:
            assert [line["step"] for line in lines_of(tmp_path / "log")] == [1, 2, 3, 4]
        checkpoint._folder._lock = None
        monitor._folder.close()  # as when the process ends
        new_process()
        keras.backend.clear_session()
    assert spent == 4 and killed.steps == [5, 6, 7, 8]
    lines = lines_of(tmp_path / "log")
    assert (
        [line["step"] for line in lines] == list(range(1, 9)) == list(scalars_of(tmp_path / "log"))
    )
    assert lines[-1]["epsilon"] == plan.spent(8).epsilon


class Killed(keras.callbacks.Callback):
    """Stops the process, as far as a callback can, after a step."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.steps = after, []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(int(self.model.optimizer.steps_spent.numpy()))
        if len(self.steps) == self.after:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_two_fits_of_one_run_go_on(tmp_path: pathlib.Path) -> None:
    model, monitor = compiled(plan_of(7)), PrivacyMonitor(str(tmp_path), every_steps=2)
    fit(model, monitor, steps_per_epoch=3)
    fit(model, monitor, steps_per_epoch=4)
    assert [line["step"] for line in lines_of(tmp_path)] == [2, 3, 4, 6, 7]


def test_a_line_that_was_not_written_whole_is_removed(tmp_path: pathlib.Path) -> None:
    model, monitor = compiled(plan_of(4)), PrivacyMonitor(str(tmp_path), every_steps=1)
    fit(model, monitor, steps_per_epoch=2)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "epsi')
    fit(model, monitor, steps_per_epoch=2)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]


class TestRefused:
    def test_the_log_of_another_run(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        with pytest.raises(PrivacyError, match="log up to step 0, .* got lines up to step 2 in"):
            fit(compiled(plan_of(2)), PrivacyMonitor(str(tmp_path)))

    @pytest.mark.parametrize("content", ["epsilon\n", "[]\n", "{}\n"])
    def test_a_file_that_is_no_log(self, tmp_path: pathlib.Path, content: str) -> None:
        (tmp_path / "log.jsonl").write_text(content)
        with pytest.raises(ValueError, match="Expected lines of JSON with their step"):
            fit(compiled(plan_of(2)), PrivacyMonitor(str(tmp_path)))

    def test_two_that_write_to_one_folder(self, tmp_path: pathlib.Path) -> None:
        monitors = [PrivacyMonitor(str(tmp_path)) for _ in range(2)]
        with pytest.raises(PrivacyError, match="Expected one run that writes its log"):
            fit(compiled(plan_of(2)), *monitors)

    @pytest.mark.parametrize("kind", ["ModelCheckpoint", "BackupAndRestore"])
    def test_beside_what_a_run_can_go_on_from_behind_its_back(
        self, tmp_path: pathlib.Path, kind: str
    ) -> None:
        saver = getattr(keras.callbacks, kind)(tmp_path / "saved.keras")
        with pytest.raises(PrivacyError, match=f"Expected PrivacyMonitor without {kind}"):
            fit(compiled(plan_of(2)), PrivacyMonitor(str(tmp_path)), saver)

    def test_a_model_without_privacy(self, tmp_path: pathlib.Path) -> None:
        model = click_model()
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="PrivacyMonitor has nothing to report"):
            model.fit(*clicks(8), callbacks=[PrivacyMonitor(str(tmp_path))], verbose=0)

    def test_arguments(self, tmp_path: pathlib.Path) -> None:
        with pytest.raises(ValueError, match="Expected every_steps"):
            PrivacyMonitor(str(tmp_path), every_steps=0)
        with pytest.raises(ValueError, match=r"Expected diagnostics in \('private', 'non_private'"):
            PrivacyMonitor(str(tmp_path), diagnostics="strict")
        with pytest.raises(ValueError, match="Expected diagnostics='non_private', which alone"):
            PrivacyMonitor(str(tmp_path)).timed(tf.data.Dataset.range(2))
