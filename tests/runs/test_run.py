"""A run is resumed by the lines that began it, and makes once what is paid once."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.accounting.budget_account import _CHARGED_HERE
from dp_sparse.core import PrivacyError
from tests.subprocesses import HANG, ROOT

N, ROWS = 48, 20
RELEASE = dp_sparse.Release("cities", dp_accounting.GaussianDpEvent(300.0))
BUDGET = dp_sparse.PrivacyBudget(2.0, 1e-3)


def plan_of(passes: int = 1, epsilon: float = 2.0) -> dp_sparse.PrivacyPlan:
    budget = dp_sparse.PrivacyBudget(epsilon, 1e-3)
    return dp_sparse.PrivacyPlan(budget, dp_sparse.StreamSampling(N, 8, passes))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, ROWS, (N, 1)).astype(np.int32), np.ones((N, 1), np.float32)


def table() -> keras.Model:
    ids = keras.Input((1,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 2, name="items")(ids))
    return keras.Model(ids, keras.layers.Dense(1)(rows))


def compiled(run: dp_sparse.Run, **options: Any) -> keras.Model:
    model = table()
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", run.plan, 1.0, **options), loss="mse")
    return model


class StopAfter(keras.callbacks.Callback):
    """As a process that is killed: the run ends without what `fit` does at its end."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


def trained(folder: Path, stop_after: int | None = None, **options: Any) -> dp_sparse.Run:
    """The lines of a script."""
    options.setdefault("every_seconds", 1e-9)  # after each step
    run = dp_sparse.Run(folder, plan_of(), log_every=2, **options)
    model = compiled(run)
    stop = [] if stop_after is None else [StopAfter(stop_after)]
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(run.batches(data()), callbacks=[*run.callbacks(), *stop], verbose=0)
    return run


def test_the_same_lines_resume_a_run(tmp_path: Path) -> None:
    first = trained(tmp_path / "run", stop_after=3)
    assert first.steps_spent == 3
    assert "after 3 of 6 steps" in first.statement()
    first.close()
    second = trained(tmp_path / "run")
    assert second.steps_spent == 6 and second.plan.plan_id == first.plan.plan_id
    assert [line["step"] for line in second.log] == [2, 4, 6]
    assert "after 6 of 6 steps" in second.statement()
    assert json.loads(second.statement(format="json"))["guarantee"]["steps"] == 6
    assert second.finished and second.resumed and not first.resumed
    second.close()
    with pytest.raises(PrivacyError, match="has ended: all 6 steps"):
        trained(tmp_path / "run")
    ended = dp_sparse.Run(tmp_path / "run", plan_of())
    assert ended.finished and ended.restore(compiled(ended)) == 6
    ended.close()


def test_a_killed_process_is_resumed_by_the_same_script(tmp_path: Path) -> None:
    """A real process, ended by SIGKILL after a step that a checkpoint holds."""
    script = [
        "import os, signal, sys, keras",
        "from pathlib import Path",
        "from tests.runs.test_run import compiled, data, plan_of",
        "import dp_sparse",
        "run = dp_sparse.Run(sys.argv[1], plan_of(), every_seconds=1e-9)",
        "class Kill(keras.callbacks.Callback):",
        "    def on_train_batch_end(self, batch, logs=None):",
        "        if len(sys.argv) > 2 and batch == int(sys.argv[2]):",
        "            os.kill(os.getpid(), signal.SIGKILL)",
        "model = compiled(run)",
        "model.fit(run.batches(data()), callbacks=[*run.callbacks(), Kill()], verbose=0)",
        "print('steps', run.steps_spent)",
    ]
    path = tmp_path / "script.py"
    path.write_text("\n".join(script))
    command = [sys.executable, str(path), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": HANG}
    killed = subprocess.run([*command, "1"], capture_output=True, text=True, **options)
    assert killed.returncode == -signal.SIGKILL
    again = subprocess.run(command, capture_output=True, text=True, **options)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "steps 6" in again.stdout


def test_selected_rows_are_made_once_and_paid_by_the_plan(tmp_path: Path) -> None:
    x, y = data()
    examples = {"items": x[:, 0]}, y

    def selected() -> tuple[dp_sparse.Run, dp_sparse.SelectedRows]:
        run = dp_sparse.Run(tmp_path, plan_of())
        return run, run.select_top_k(examples, {"items": ROWS}, 5, share=0.1)

    run, rows = selected()
    model = table()
    optimizer = dp_sparse.DPFESTOptimizer("sgd", run.plan, 1.0, rows=rows)
    model.compile(optimizer, loss="mse")
    assert "top 5 rows" in run.plan.statement() and run.plan.releases == (rows.release,)
    assert run.plan.spent(6).epsilon <= 2.0
    with pytest.raises(ValueError, match="before the first use of run.plan"):
        run.select_top_k(examples, {"items": ROWS}, 5)
    run.close()
    other = dp_sparse.Run(tmp_path, plan_of())
    with pytest.raises(ValueError, match=r"released rows for .*'k': 5.* got .*'k': 6"):
        other.select_top_k(examples, {"items": ROWS}, 6)
    other.close()
    again, same = selected()
    np.testing.assert_array_equal(same.row_ids["items"], rows.row_ids["items"])
    assert again.plan == run.plan
    again.close()
    (tmp_path / "rows.npz").unlink()
    with pytest.raises(ValueError, match="rows.npz is missing"):
        selected()


def test_a_run_that_has_begun_makes_no_further_release(tmp_path: Path) -> None:
    """The plan would not pay for it."""
    run = dp_sparse.Run(tmp_path, plan_of())
    model = compiled(run)
    model.fit(run.batches(data()), callbacks=run.callbacks(), steps_per_epoch=1, verbose=0)
    run.close()
    again, made = dp_sparse.Run(tmp_path, plan_of()), []

    def make() -> dp_sparse.SelectedRows:
        made.append(1)
        return dp_sparse.SelectedRows.public({"items": [0]}, {"items": ROWS})

    with pytest.raises(ValueError, match="which the plan of this run paid for"):
        again.release("cities.npz", make, dp_sparse.SelectedRows.load)
    assert not made
    again.close()


def test_rows_that_a_killed_run_selected_are_paid(tmp_path: Path) -> None:
    """The next process must not make a plan without them."""
    x, y = data()
    examples, tables = ({"items": x[:, 0]}, y), {"items": ROWS}
    killed = dp_sparse.Run(tmp_path, plan_of())
    rows = killed.select_top_k(examples, tables, 5, share=0.1)
    killed.close()
    forgets = dp_sparse.Run(tmp_path, plan_of())
    with pytest.raises(ValueError, match="the plan does not pay for it"):
        _ = forgets.plan
    assert not (tmp_path / "plan.json").exists()
    forgets.select_top_k(examples, tables, 5, share=0.1)
    assert forgets.plan.releases == (rows.release,)


def test_an_account_is_charged_once(tmp_path: Path) -> None:
    account = dp_sparse.BudgetAccount(tmp_path / "budget.json", BUDGET)
    trained(tmp_path / "run", stop_after=2, account=account).close()
    trained(tmp_path / "run", account=tmp_path / "budget.json").close()
    assert [charge.note for charge in account.charges] == ["run"]
    with pytest.raises(PrivacyError, match="within what is left"):
        trained(tmp_path / "other", account=account)
    with pytest.raises(ValueError, match="began with account="):
        dp_sparse.Run(tmp_path / "run", plan_of())
    smaller = dp_sparse.BudgetAccount(tmp_path / "more.json", dp_sparse.PrivacyBudget(9.0, 1e-2))
    trained(tmp_path / "other", account=smaller).close()  # nothing of the refused run is there


def test_rows_are_not_selected_beyond_the_account(tmp_path: Path) -> None:
    account = dp_sparse.BudgetAccount(tmp_path / "b.json", dp_sparse.PrivacyBudget(0.5, 1e-3))
    x, y = data()
    run = dp_sparse.Run(tmp_path / "run", plan_of(), account=account)
    with pytest.raises(PrivacyError, match="within what is left"):
        run.select_top_k(({"items": x[:, 0]}, y), {"items": ROWS}, 5)
    assert not (tmp_path / "run" / "rows.npz").exists()


def test_a_charged_plan_pays_for_one_folder(tmp_path: Path) -> None:
    """Also where the other one made a release first, which begins a run."""
    account = dp_sparse.BudgetAccount(tmp_path / "b.json", dp_sparse.PrivacyBudget(4.0, 2e-3))
    plan = plan_of().calibrate()
    assert dp_sparse.Run(tmp_path / "a", plan, account=account).plan == plan
    other = dp_sparse.Run(tmp_path / "b", plan, account=account)
    rows = dp_sparse.SelectedRows.public({"items": [1]}, {"items": ROWS})
    other.release("rows.npz", lambda: rows, dp_sparse.SelectedRows.load)
    _CHARGED_HERE.clear()  # as in another process
    for _ in range(2):  # as a supervisor starts it again
        with pytest.raises(PrivacyError, match="charged"):
            _ = other.plan
        other.close()
        other = dp_sparse.Run(tmp_path / "b", plan, account=account)


def test_steps_without_the_callbacks_are_refused(tmp_path: Path) -> None:
    """The folder would not know of them, and another process take them again."""
    run = dp_sparse.Run(tmp_path, plan_of())
    model = compiled(run)
    with pytest.raises(PrivacyError, match=r"Pass callbacks=run.callbacks\(\)"):
        model.fit(run.batches(data()), verbose=0)
    with pytest.raises(PrivacyError, match=r"Pass callbacks=run.callbacks\(\)"):
        model.train_on_batch(*next(iter(run.batches(data()))))
    assert int(model.optimizer.steps_spent) == 0
    run.restore(model)
    model.train_on_batch(*next(iter(run.batches(data()))))
    assert int(model.optimizer.steps_spent) == 1


def test_a_closed_run_trains_no_more(tmp_path: Path) -> None:
    """Another process has resumed it, and published more steps."""
    run = dp_sparse.Run(tmp_path, plan_of(), every_seconds=1e-9)
    model = compiled(run)
    callbacks = [*run.callbacks(), StopAfter(2)]
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(run.batches(data()), callbacks=callbacks, verbose=0)
    run.close()
    with pytest.raises(PrivacyError, match="was closed"):
        model.fit(run.batches(data()), callbacks=callbacks, verbose=0)
    published = json.loads((tmp_path / "checkpoints" / "published.json").read_text())
    assert published["published"] == 2
    published["published"] = 5
    (tmp_path / "checkpoints" / "published.json").write_text(json.dumps(published))
    with pytest.raises(PrivacyError, match="has published 5 steps, more than the 2"):
        run._checkpoint._folder.publish(run.plan.fingerprint, 2)


def test_a_cell_of_a_notebook_runs_again(tmp_path: Path) -> None:
    """A new `Run` closes the one before, which saves what it trained; an interrupt goes on."""
    run = dp_sparse.Run(tmp_path, plan_of())
    model = compiled(run)
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(run.batches(data()), callbacks=[*run.callbacks(), StopAfter(2)], verbose=0)
    assert run.steps_spent == 0  # not saved yet
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(run.batches(data()), callbacks=[*run.callbacks(), StopAfter(1)], verbose=0)
    assert int(model.optimizer.steps_spent) == 3
    again = dp_sparse.Run(tmp_path, plan_of())
    assert again.steps_spent == 3
    model = compiled(again)
    model.fit(again.batches(data()), callbacks=again.callbacks(), verbose=0)
    assert again.steps_spent == 6


def test_a_model_without_weights_yet(tmp_path: Path) -> None:
    """Its class makes them from the first batch."""

    class Scores(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(ROWS, 2)
            self.score = keras.layers.Dense(1)

        def call(self, ids: tf.Tensor) -> tf.Tensor:
            return self.score(self.table(ids[:, 0]))

    for stop_after, spent in ((2, 2), (None, 6)):
        run = dp_sparse.Run(tmp_path, plan_of(), every_seconds=1e-9)
        model = Scores()
        model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", run.plan, 1.0), loss="mse")
        stop = [] if stop_after is None else [StopAfter(stop_after)]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(run.batches(data()), callbacks=[*run.callbacks(), *stop], verbose=0)
        assert run.steps_spent == spent
        run.close()


def test_a_model_that_is_compiled_anew(tmp_path: Path) -> None:
    run = trained(tmp_path, stop_after=2)
    model = compiled(run)
    with pytest.raises(PrivacyError, match=r"Make the run again"):
        model.fit(run.batches(data()), callbacks=run.callbacks(), verbose=0)


def test_what_the_folder_refuses(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process has it
        with pytest.raises(ValueError, match="Another run is using"):
            dp_sparse.Run(tmp_path, plan_of())
    run = trained(tmp_path, stop_after=1, settings={"width": (2, 3)})
    run.close()
    with pytest.raises(ValueError, match=r"began with width=\(2, 3\), got width=3"):
        dp_sparse.Run(tmp_path, plan_of(), settings={"width": "3"})
    settings = {"settings": {"width": (2, 3)}}
    for other, name in ((plan_of(passes=2), "sampling"), (plan_of(epsilon=1.0), "budget")):
        changed = dp_sparse.Run(tmp_path, other, **settings)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"has a plan with {name}="):
            _ = changed.plan
        changed.close()
    calibrated = dp_sparse.Run(tmp_path, plan_of().calibrate(), **settings)  # type: ignore[arg-type]
    assert calibrated.plan == run.plan
    calibrated.close()
    released = dataclasses.replace(plan_of(), releases=(RELEASE,))
    more = dp_sparse.Run(tmp_path, released, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without the release 'cities'"):
        _ = more.plan
    more.close()
    for content in ("{", "{}", "[]"):
        (tmp_path / "plan.json").write_text(content)
        damaged = dp_sparse.Run(tmp_path, plan_of(), **settings)  # type: ignore[arg-type]
        with pytest.raises(PrivacyError, match=r"plan.json is damaged"):
            _ = damaged.plan
        damaged.close()
    (tmp_path / "plan.json").unlink()
    lost = dp_sparse.Run(tmp_path, plan_of(), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"plan.json is missing, under which steps were taken"):
        _ = lost.plan
    lost.close()
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"run.json is missing, but begun.json"):
        dp_sparse.Run(tmp_path, plan_of(), **settings)  # type: ignore[arg-type]


def test_lost_checkpoints_are_an_error(tmp_path: Path) -> None:
    trained(tmp_path, stop_after=2).close()
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(PrivacyError, match="a run that has begun"):
        trained(tmp_path)


def test_an_optimizer_with_another_plan(tmp_path: Path) -> None:
    """A plan of its own, which the account was never charged for."""
    run = dp_sparse.Run(tmp_path, plan_of())
    model = table()
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan_of().calibrate(), 1.0)
    model.compile(optimizer, loss="mse")
    with pytest.raises(PrivacyError, match="with plan=run.plan"):
        model.fit(run.batches(data()), callbacks=run.callbacks(), verbose=0)
    assert int(optimizer.steps_spent) == 0


def test_without_a_log_or_a_plan(tmp_path: Path) -> None:
    run = dp_sparse.Run(tmp_path, log_every=None)
    assert len(run.callbacks()) == 1 and run.log == []
    with pytest.raises(ValueError, match="got no plan"):
        _ = run.plan
    made = run.plan_once(plan_of().calibrate)
    assert run.plan == made and json.loads((tmp_path / "plan.json").read_text())
    with pytest.raises(ValueError, match="Expected a local folder"):
        dp_sparse.Run("gs://bucket/run", plan_of())


def test_a_poisson_run_and_its_export(tmp_path: Path) -> None:
    sampling = dp_sparse.PoissonSampling(N, 8, steps=4)
    run = dp_sparse.Run(tmp_path, dp_sparse.PrivacyPlan(BUDGET, sampling))
    model = compiled(run)
    x, y = data()
    model.fit(run.batches((x, y), class_weight={1: 2.0}), callbacks=run.callbacks(), verbose=0)
    export = run.export(model)
    assert export.steps == 4 and (tmp_path / "export" / "statement.txt").exists()
    served = keras.models.load_model(tmp_path / "export" / "keras")
    np.testing.assert_allclose(served.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
    assert tf.io.gfile.exists(str(tmp_path / "log" / "log.jsonl"))
