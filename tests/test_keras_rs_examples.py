"""The ten examples of keras-rs train in a small world, and their page is what stands there."""

import dataclasses
import importlib
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dp_sparse
from examples.keras_rs import movielens, names, page, study, task
from tests.subprocesses import ROOT, run_python

RESULTS = ROOT / "docs" / "results"
ALONE = "data_parallel_retrieval"  # it divides the processor before TensorFlow begins
LOSES_ITS_LOSS = ("multi_task", "sequential_retrieval")
SMALL = """
import dataclasses, importlib
from examples.keras_rs import movielens, task
script = importlib.import_module("examples.keras_rs.data_parallel_retrieval")
script.virtual_processors()
for own in (task.train, lambda made: task.train_privately(made, 8.0, "DP-AdaFEST")):
    made = script.task(movielens.made_up(30, 150))
    assert made.model.distribute_strategy.num_replicas_in_sync == 2
    own(dataclasses.replace(made, epochs=1))
    print(*made.scores(made.model).values())
"""


def script_of(name: str) -> Any:
    return importlib.import_module(f"examples.keras_rs.{name}")


@pytest.mark.parametrize("optimizer", names.OPTIMIZERS)
@pytest.mark.parametrize("name", [name for name in names.SCRIPTS if name != ALONE])
def test_scripts_train_privately(name: str, optimizer: str) -> None:
    made = script_of(name).task(movielens.made_up(30, 150))
    history = task.train_privately(dataclasses.replace(made, epochs=1), 8.0, optimizer)
    assert made.model.optimizer.steps_left == 0 and np.isfinite(history.history["loss"]).all()
    assert np.isfinite([*made.scores(made.model).values()]).all()


@pytest.mark.parametrize("name", ["listwise_ranking", *LOSES_ITS_LOSS])
def test_scripts_train_as_the_tutorials_do(name: str) -> None:
    script = script_of(name)
    made = getattr(script, "stock", script.task)(movielens.made_up(30, 150))
    task.train(dataclasses.replace(made, epochs=1))
    assert np.isfinite([*made.scores(made.model).values()]).all()


@pytest.mark.parametrize("name", ["basic_ranking", "multi_task"])
def test_the_command_of_a_script(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--epsilon=8", "--users=30", "--films=60"])
    runpy.run_module(f"examples.keras_rs.{name}", run_name="__main__")
    stock, private = capsys.readouterr().out.splitlines()
    assert stock.startswith("without privacy: RMSE ")
    assert private.startswith("epsilon = 8: RMSE ")


def test_the_script_on_several_devices() -> None:
    told = run_python(SMALL).splitlines()
    assert len(told) == 2 and all(np.isfinite(float(line)) for line in told)


@pytest.mark.parametrize("name", LOSES_ITS_LOSS)
def test_losses_over_the_batch_are_refused_with_what_replaces_them(name: str) -> None:
    with pytest.raises(dp_sparse.PrivacyError, match="SampledSoftmax"):
        task.train_privately(script_of(name).stock(movielens.made_up(30, 150)), 8.0, names.PRIVATE)


def test_lines_that_change() -> None:
    changed = {}
    for name in LOSES_ITS_LOSS:
        script = script_of(name)
        changed[name] = task.lines_changed(script.InBatch, script.Sampled)
    assert all(names.TWO_LINES < lines < 12 for lines in changed.values()), changed
    assert not any(
        hasattr(script_of(name), "stock") for name in names.SCRIPTS if name not in LOSES_ITS_LOSS
    )


def test_the_world_is_like_movielens() -> None:
    world, again = (movielens.made_up(200, 300, seed=3) for _ in range(2))
    np.testing.assert_array_equal(world.rating, again.rating)
    assert set(np.unique(world.rating)) == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert world.user_id.min() == 1 and world.num_users == 201 and world.num_films == 301
    sequences = world.sequences()
    assert len(sequences) == 200 and min(map(len, sequences)) >= movielens.LEAST
    assert all(len(np.unique(films)) == len(films) for films in sequences)
    counts = np.sort(np.bincount(world.movie_id, minlength=301)[1:])
    assert counts[-30:].sum() > 3 * counts[:30].sum()  # some are popular


def test_rows_that_judge_do_not_train() -> None:
    ours, others = task.split({"a": np.arange(100), "b": 2 * np.arange(100)})
    assert sorted([*ours["a"], *others["a"]]) == list(range(100)) and len(ours["a"]) == 80
    np.testing.assert_array_equal(2 * ours["a"], ours["b"])


def test_the_study_runs_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [x for x in names.POINTS if x["group"] == "listwise_ranking"]
    monkeypatch.setattr(study, "POINTS", few)
    monkeypatch.setattr(page, "POINTS", few)
    monkeypatch.setattr(page, "SCRIPTS", ("listwise_ranking",))
    monkeypatch.setattr(study, "in_own_process", lambda function, *args: function(*args))
    monkeypatch.setattr(study, "_TURNS", 1)
    monkeypatch.setattr(study, "_STEPS", 2)
    arguments = [f"--results={tmp_path / 'a.jsonl'}", f"--page={tmp_path / 'a.md'}"]
    assert study.main([*arguments, "--run", "--users=30", "--films=150"]) == 0
    written = (tmp_path / "a.md").read_text()
    assert "Runs that are missing" not in written and written.count("| `listwise_ranking` |") == 2
    assert study.main([*arguments, "--users=31", "--films=150"]) == 1  # of another world


def test_the_page(tmp_path: Path) -> None:
    written = tmp_path / "keras_rs.md"
    arguments = [f"--results={RESULTS / 'keras_rs.jsonl'}", f"--page={written}"]
    assert study.main(arguments) == 0
    assert written.read_text() == (RESULTS / "keras_rs.md").read_text()
