"""The examples of the README and of pages of docs without a test of their own run as printed."""

import gzip
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.__main__ import main

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


def python_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def first_model() -> str:
    """The README's first model, for fewer steps."""
    train, _ = python_of(README)
    assert "steps=20_000" in train
    return train.replace("steps=20_000", "steps=20")


def model_of_two_tables() -> keras.Model:
    users = keras.Input((), dtype="int32")
    words = keras.Input((3,), dtype="int32")
    looked_up = keras.layers.Embedding(100_000, 4, name="users")(users)
    text = keras.layers.Flatten()(keras.layers.Embedding(50_000, 4, name="words")(words))
    features = keras.layers.Concatenate()([looked_up, text])
    output = keras.layers.Dense(1, activation="sigmoid")(features)
    return keras.Model({"users": users, "words": words}, output)


def test_the_examples_run_as_printed(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng, num_examples = np.random.default_rng(0), 4000
    x = {
        "users": rng.integers(0, 100_000, num_examples).astype(np.int32),
        "words": rng.integers(0, 50_000, (num_examples, 3)).astype(np.int32),
    }
    examples = x, (x["users"] < 30_000).astype(np.float32)
    names = {
        "num_examples": num_examples,
        "dataset": examples,
        "examples": examples,
        "model": model_of_two_tables(),
    }
    (account,) = python_of(DOCS / "budgets.md")
    explain, over_window, wide, select = python_of(DOCS / "big_tables.md")
    (exponential,) = python_of(DOCS / "optimizers.md")
    exec(first_model(), names)
    printed = capsys.readouterr().out
    assert "dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(" in printed
    assert "differential privacy protects one example over at most 20 steps" in printed
    exec(account, names)
    assert len(dp_sparse.BudgetAccount("clicks.budget.json").charges) == 1
    exec(explain, names)
    printed = capsys.readouterr().out
    assert "threshold = " in printed and "rows noised a step: 500" in printed
    names["model"] = model_of_two_tables()
    assert isinstance(names["optimizer"], dp_sparse.DPAdaFESTOptimizer)
    exec(over_window, names)
    windowed, found = names["windowed"], names["forecast"]
    assert (windowed.window, windowed.expected_false_rows) == (
        found.window,
        found.expected_false_rows,
    )
    exec(wide, names)
    narrow, tables = names["narrow"], (50_000, 1)
    narrow.optimizer.build(narrow.trainable_variables)
    assert [tuple(table.shape) for table in narrow.optimizer.noised_tables] == [tables]
    exec(select, names)
    plan = names["plan"]
    assert isinstance(plan, dp_sparse.PrivacyPlan) and "top 1000 rows of 2" in plan.statement()
    names["model"].fit(plan.sampling.batches(examples), steps_per_epoch=2, verbose=0)
    exec(exponential, names)
    assert isinstance(names["optimizer"], dp_sparse.ExponentialSelectionOptimizer)


@pytest.mark.parametrize(("page", "place"), [("README.md", 1), ("docs/long_runs.md", 0)])
def test_a_run_that_survives_a_kill_runs_as_printed(
    page: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, in one process; the second time it has no step left."""
    monkeypatch.chdir(tmp_path)
    example = python_of(README.parent / page)[place]
    account = dp_sparse.BudgetAccount("clicks.budget.json", dp_sparse.PrivacyBudget(1.0, 1e-5))
    names = names_of_a_run()
    exec(example, names)
    run = names["run"]
    assert run.steps_spent == 4 and run.log[-1]["step"] == 4
    run.close()
    again = names_of_a_run()
    with pytest.raises(dp_sparse.PrivacyError, match="has ended: all 4 steps"):
        exec(example, again)
    assert len(account.charges) == ("account=" in example)


def names_of_a_run() -> dict[str, Any]:
    sampling = dp_sparse.PoissonSampling(num_examples=300, expected_batch_size=100, steps=4)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling).calibrate()
    layers = [keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")]
    dataset = np.ones((300, 2), np.float32), np.ones((300, 1), np.float32)
    model = keras.Sequential(layers)
    return {"dp_sparse": dp_sparse, "plan": plan, "model": model, "dataset": dataset}


def test_checkpoints_alone_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, example = python_of(DOCS / "long_runs.md")
    names = names_of_a_run()
    names["model"].compile(dp_sparse.DPSGDOptimizer("sgd", names["plan"], clip_norm=1.0), "mse")
    exec(example, names)
    checkpoint = names["checkpoint"]
    assert isinstance(checkpoint, dp_sparse.PrivateCheckpoint) and checkpoint.steps == [4]
    assert names["spent"] == 0


def test_augmentation_runs_as_printed() -> None:
    *_, example = python_of(DOCS / "data.md")
    sampling = dp_sparse.PoissonSampling(num_examples=16, expected_batch_size=8, steps=2)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()
    layers = [keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), "mse")
    images = np.random.default_rng(0).random((16, 4, 4, 3), np.float32)
    labels = np.ones((16, 1), np.float32)
    names = {"tf": tf, "plan": plan, "model": model, "images": images, "labels": labels}
    exec(example, names)
    assert int(model.optimizer.steps_spent) == 2


def test_records_of_files_are_written_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    example, *_ = python_of(DOCS / "data.md")
    text = "user,city,clicked\n" + "".join(f"u{i},c{i % 3},{i % 2}\n" for i in range(8))
    Path("monday.csv").write_text(text)
    Path("tuesday.csv.gz").write_bytes(gzip.compress(text.encode()))
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "city")}
    sizes = {"user": 2**20, "city": 4096}
    rows = [keras.layers.Embedding(size, 2)(inputs[name]) for name, size in sizes.items()]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    sampling = dp_sparse.PoissonSampling(num_examples=16, expected_batch_size=8, steps=2)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0), "mse")
    names = {"dp_sparse": dp_sparse, "plan": plan, "model": model}
    exec(example, names)
    assert len(names["clicks"]) == 16 and int(model.optimizer.steps_spent) == 2


def test_the_command_for_plans_runs_as_printed(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"python -m dp_sparse (.*)", (DOCS / "budgets.md").read_text())
    assert main(shlex.split(command)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4 + 2
    assert Path("plans.png").exists()


def test_the_statement_begins_as_printed() -> None:
    """With the noise that the plan above finds for a million examples."""
    sampling = dp_sparse.PoissonSampling(1_000_000, 2048, 20_000)
    budget = dp_sparse.PrivacyBudget(1.0, 1e-6)
    statement = dp_sparse.PrivacyPlan(budget, sampling, noise_multiplier=1.413288).statement()
    (printed,) = re.findall(r"```\n(Guarantee.*?)```", README.read_text(), re.DOTALL)
    assert len(printed.splitlines()) == 8 and statement.startswith(printed)


def test_ten_lines_on_a_csv_run_as_printed(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = [f"u{rng.integers(300)},{rng.integers(50)},0.5,{i % 2}\n" for i in range(3000)]
    Path("monday.csv").write_text("".join(["user,item,price,clicked\n", *lines]))
    *_, example = python_of(DOCS / "first_model.md")
    assert len(example.splitlines()) == 1 + 1 + 10  # an import, an empty line and ten
    names: dict[str, Any] = {}
    exec(example, names)
    assert "over at most 15 steps; the budget is epsilon=3." in capsys.readouterr().out
    model, x, clicked = names["model"], names["x"], names["rows"]["clicked"]
    assert int(model.optimizer.steps_spent) == 15
    assert model.predict(x, verbose=0).shape == (3000, 1)
    assert len(model.evaluate(x, clicked, verbose=0)) == 2


@pytest.mark.cases(1)
def test_the_example_of_re_attention_runs_as_printed() -> None:
    (example,) = python_of(DOCS / "sequences.md")
    names: dict[str, Any] = {}
    exec(example, names)
    assert int(names["model"].optimizer.steps_spent) == 20
    assert names["plan"].spent(20).epsilon <= 8 and names["plan"].releases


def test_the_example_of_embedding_layers_runs_as_printed() -> None:
    rng, num_examples = np.random.default_rng(0), 400
    sampling = dp_sparse.PoissonSampling(num_examples, 50, 6)
    names = {
        "plan": dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-4), sampling).calibrate(),
        "user_ids": rng.integers(0, 100_000, num_examples),
        "title_ids": rng.integers(-1, 50_000, (num_examples, 20)),
        "y": rng.integers(0, 2, num_examples).astype("float32"),
    }
    (example,) = python_of(DOCS / "tpu.md")
    exec(example, names)
    assert names["scores"].shape == (num_examples, 1)
    assert int(names["optimizer"].steps_spent.numpy()) == 6


METHODS = {"DPSGDOptimizer": "dpsgd", "DPAdaFESTOptimizer": "adafest", "DPFESTOptimizer": "fest"}


@pytest.mark.parametrize("optimizer", METHODS)
def test_figures_of_optimizers_are_those_of_the_studies(optimizer: str) -> None:
    """AUC of the best setting at ε = 1 on two tasks, and milliseconds at two sizes."""
    row = re.search(
        rf"^\| `{optimizer}` \|.*\| (.*); (.*) \| (.*); (.*) \|$", README.read_text(), re.M
    )
    assert row is not None
    name = METHODS[optimizer]
    tables = (DOCS / "results" / "defaults.md").read_text()
    best = re.findall(rf"^\| 1 \| best (?:dp_)?{_of_study(name)} \|.*", tables, re.M)
    assert [cells.split("|")[5].strip() for cells in best[:2]] == list(row.groups()[:2])
    times = (DOCS / "results" / "selection.md").read_text()
    found = [re.search(rf"^ *{name} +{rows} +(\S+)", times, re.M) for rows in ("1e5", "1e6")]
    assert [each and each[1] for each in found] == list(row.groups()[2:])


def _of_study(name: str) -> str:
    return {"dpsgd": "sgd"}.get(name, name)


def test_the_commands_of_the_makefile_can_be_made() -> None:
    """What `make reached`, `make whole` and `make kernels` would run names files that are there."""
    root = README.parent
    made = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/installed", "reached", "whole", "kernels"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = set(re.findall(r"tests/[\w/.]+", made))
    assert len(paths) > 10 and not [path for path in paths if not (root / path).exists()]
    for command in ("--reached=", "git rev-parse HEAD > .ci/checked", "NPY_DISABLE_CPU_FEATURES"):
        assert command in made


def test_probabilities_are_calibrated_as_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = python_of(DOCS / "probabilities.md")
    sampling = dp_sparse.StreamSampling(num_examples=2000, batch_size=500)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-4), sampling)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, activation="sigmoid")])
    x = np.random.default_rng(0).normal(size=(2000, 1)).astype(np.float32)
    exec(
        example,
        {
            "keras": keras,
            "dp_sparse": dp_sparse,
            "plan": plan,
            "model": model,
            "x": x,
            "y": (x[:, 0] > 0).astype(np.float32),
        },
    )
    assert "log loss of a constant: " in capsys.readouterr().out
    assert "score histogram" in dp_sparse.check_export("served").statement


def test_what_sparsity_costs_stands_on_its_page() -> None:
    text = " ".join(README.read_text().split())
    pattern = (
        r"never train lose (\S+) of AUC, DP-AdaFEST with noise on 1 of (\S+) .*? reaches (\S+), "
        r"and DP-SGD (\S+) "
    )
    (told,) = re.findall(pattern, text)
    page = (DOCS / "results" / "criteo_kaggle.md").read_text().partition("## Two million")[2]
    frozen, reduction, sparse, dense = told
    assert f"never train lose +{frozen} ±" in page
    assert re.search(rf"^\| DP-AdaFEST, λ=1 \| {sparse} .* {reduction} \|$", page, re.M)
    assert re.search(rf"^\| DP-SGD, learning rate 0.003 \| {dense} \|  \|", page, re.M)
