"""What a process has shown of its run stays spent: weights, metrics, releases, charges."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse.core import PrivacyError
from dp_sparse.training import checkpoint
from tests.runs.test_run import ROWS, compiled, data, plan_of


def restored(folder: Path) -> tuple[dp_sparse.Run, keras.Model, Any]:
    """A run of a loop of its own, and the batches that are left."""
    run = dp_sparse.Run(folder, plan_of(), every_seconds=1e9, log_every=None)
    model = compiled(run)
    run.restore(model)
    return run, model, iter(run.batches(data()))


SHOWS: dict[str, Callable[[keras.Model], Any]] = {
    "evaluate": lambda model: model.evaluate(*data(), verbose=0),
    "predict": lambda model: model.predict(data()[0], verbose=0),
    "get_weights": lambda model: model.get_weights(),
    "the end of the process": lambda model: checkpoint._save_at_exit(),
}


def taken(model: keras.Model, batches: Any, steps: int) -> None:
    for _ in range(steps):
        model.train_step(next(batches))


@pytest.mark.parametrize("show", list(SHOWS))
def test_what_shows_weights_is_saved_before(tmp_path: Path, show: str) -> None:
    """Otherwise the next process would take the same steps again, with other noise."""
    run, model, batches = restored(tmp_path)
    taken(model, batches, 2)
    assert run.steps_spent == 0
    SHOWS[show](model)
    assert run.steps_spent == 2
    taken(model, batches, 1)
    SHOWS[show](model)
    assert run.steps_spent == 3
    run.close()


def test_validation_is_seen_after_its_steps_are_saved(tmp_path: Path) -> None:
    spent: list[int] = []

    class Seen(keras.callbacks.Callback):
        def on_test_end(self, logs: Any = None) -> None:
            spent.append(run.steps_spent)

    run = dp_sparse.Run(tmp_path, plan_of(), every_seconds=1e9)
    model, callbacks = compiled(run), [*run.callbacks(), Seen()]
    held_out = np.zeros((4, 1), np.int32), np.ones((4, 1))
    model.fit(run.batches(data()), validation_data=held_out, callbacks=callbacks, verbose=0)
    assert spent == [6]
    run.close()


def test_another_model_of_the_run_goes_on_behind_the_first(tmp_path: Path) -> None:
    run, model, batches = restored(tmp_path)
    taken(model, batches, 2)
    other = compiled(run)
    assert run.restore(other) == 2 and run.steps_spent == 2
    run.close()


def test_steps_of_a_model_that_was_compiled_anew_are_spent(tmp_path: Path) -> None:
    """Its weights are the run's no more, so nothing of these steps can be restored."""
    run, model, batches = restored(tmp_path)
    taken(model, batches, 2)
    model.compile("sgd", "mse")
    with pytest.raises(PrivacyError, match="has published 2 steps, got none that is whole"):
        run.restore(compiled(run))
    run.close()


def test_one_charge_pays_for_one_folder(tmp_path: Path, new_process: Callable[[], None]) -> None:
    """A plan that was calibrated before is the same in each folder."""
    account = tmp_path / "budget.json"
    dp_sparse.BudgetAccount(account, dp_sparse.PrivacyBudget(9.0, 1e-2))
    plan = plan_of().calibrate()
    first = dp_sparse.Run(tmp_path / "a", plan, account=account)
    assert first.plan.run_id == plan.run_id
    for _ in range(2):
        second = dp_sparse.Run(tmp_path / "b", plan, account=account)
        with pytest.raises(PrivacyError, match="which another run made: one plan pays for one run"):
            _ = second.plan
        second.close()
        new_process()
    first.close()
    again = dp_sparse.Run(tmp_path / "a", plan, account=account)
    assert again.plan.run_id == plan.run_id
    again.close()
    (tmp_path / "a" / "charged.json").unlink()
    lost = dp_sparse.Run(tmp_path / "a", plan, account=account)
    with pytest.raises(PrivacyError, match="one plan pays for one run"):
        _ = lost.plan
    assert (tmp_path / "a" / "plan.json").exists()  # of a run that was paid
    lost.close()


def test_a_release_that_is_lost_is_not_made_again(tmp_path: Path) -> None:
    x, y = data()
    examples = {"items": x[:, 0]}, y
    run = dp_sparse.Run(tmp_path, plan_of())
    run.select_top_k(examples, {"items": ROWS}, 5, share=0.1)
    run.close()
    (tmp_path / "rows.npz").unlink()  # before the plan was made
    again = dp_sparse.Run(tmp_path, plan_of())
    with pytest.raises(ValueError, match="rows.npz is missing, which this run has released"):
        again.select_top_k(examples, {"items": ROWS}, 5, share=0.1)
    again.close()


def test_releases_are_charged_before_they_are_made(tmp_path: Path) -> None:
    """Each folder has its own; the plan's charge takes the place of the reservation."""
    account = tmp_path / "budget.json"
    dp_sparse.BudgetAccount(account, dp_sparse.PrivacyBudget(4.0, 2e-3))  # two plans
    x, y = data()
    examples = {"items": x[:, 0]}, y

    def selected(name: str) -> dp_sparse.Run:
        run = dp_sparse.Run(tmp_path / name, plan_of(), account=account)
        run.select_top_k(examples, {"items": ROWS}, 5, share=0.1)
        return run

    runs = [selected("a"), selected("b")]
    charges = dp_sparse.BudgetAccount(account).charges
    assert [charge.note for charge in charges] == ["a", "b"]
    with pytest.raises(PrivacyError, match="within what is left"):
        selected("c")
    assert not (tmp_path / "c" / "rows.npz").exists()
    for number, run in enumerate(runs):
        assert run.plan.releases
        run.close()
        found = dp_sparse.BudgetAccount(account).charges
        assert len(found) == 2 and found[-1].run_id == run.plan.run_id, number
