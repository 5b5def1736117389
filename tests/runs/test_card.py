"""A model card holds what was released, and marks all that was not."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse.probabilities import score_histogram

N, NOISE = 400, 3.0
HEADINGS = [
    "Model details",
    "Intended use",
    "Training data",
    "Privacy guarantee",
    "Evaluation",
    "Limitations",
]


def examples() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(N, 1)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.float32)


def model_of(*releases: dp_sparse.Release) -> keras.Model:
    """Before the first step of a plan that pays for these releases."""
    sampling = dp_sparse.StreamSampling(num_examples=N, batch_size=N)
    budget = dp_sparse.PrivacyBudget(8.0, 1e-3)
    plan = dp_sparse.PrivacyPlan(budget, sampling, releases=releases).with_noise(2.0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, activation="sigmoid")])
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0)
    model.compile(optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """An export, and the calibration that its plan pays for."""
    model = model_of(score_histogram.release_of(NOISE))
    calibration = dp_sparse.calibrate_probabilities(model, examples())
    folder = tmp_path_factory.mktemp("card") / "clicks"
    return dp_sparse.export_model(model, folder, as_model=calibration), calibration


def section(card: str, heading: str) -> str:
    return card.partition(f"\n## {heading}\n\n")[2].partition("\n## ")[0]


def test_it_has_the_headings_and_what_the_export_says(made: tuple[Any, Any]) -> None:
    export, _ = made
    card = dp_sparse.model_card(export)
    assert card.startswith("# Model card: clicks\n")
    assert re.findall(r"^## (.*)$", card, re.MULTILINE) == HEADINGS
    indented = section(card, "Privacy guarantee").splitlines()
    assert [line.removeprefix("    ") for line in indented if line] == export.statement.splitlines()
    details = section(card, "Model details")
    assert f"{export.steps} steps" in details and export.digest in details
    sizes = [np.prod(weight.shape) for weight in export.weights]
    assert f"{len(sizes)} weights hold {int(sum(sizes)):,} numbers" in details
    data = section(card, "Training data")
    assert f"The number of examples ({N})" in data and "Philox" not in data
    limitations = section(card, "Limitations")
    assert "protected, not a person" in limitations and "No ε covers: Training loss" in limitations
    for heading in ("Intended use", "Training data", "Limitations"):
        assert "Fill in" in section(card, heading)


def test_a_folder_has_the_card_of_its_export(made: tuple[Any, Any]) -> None:
    export, _ = made
    assert dp_sparse.model_card(export.path) == dp_sparse.model_card(export)
    assert dp_sparse.model_card(str(export.path)) == dp_sparse.model_card(export)


def test_released_measures_stand_apart_from_those_that_no_epsilon_covers(
    made: tuple[Any, Any],
) -> None:
    export, calibration = made
    without = dp_sparse.model_card(export)
    assert "Nothing was released" in section(without, "Evaluation")
    assert "calibrate them" in section(without, "Limitations")
    card = dp_sparse.model_card(export, calibration=calibration, not_covered={"my AUC": 0.12345})
    released, _, marked = section(card, "Evaluation").partition("**Not private: no ε covers")
    for name, before, after in calibration.rows():
        assert f"| {name} | {before} | {after} |" in released
    assert "examples that trained the model" in released
    assert "| my AUC | 0.1235 |" in marked and card.count("my AUC") == card.count("0.1235") == 1
    assert "calibrate them" not in card


def test_nothing_of_training_is_in_it(made: tuple[Any, Any]) -> None:
    export, calibration = made
    card = dp_sparse.model_card(export, calibration=calibration)
    assert "accuracy" not in card and "loss" not in section(card, "Model details")
    assert "Not private" not in card


def test_a_calibration_on_examples_apart_stands_with_its_own_budget(tmp_path: Path) -> None:
    model = model_of()
    budget = dp_sparse.PrivacyBudget(0.5, 1e-6)
    calibration = dp_sparse.calibrate_probabilities(model, examples(), budget=budget)
    export = dp_sparse.export_model(model, tmp_path / "x")
    evaluation = section(dp_sparse.model_card(export, calibration=calibration), "Evaluation")
    assert "(0.5, 1e-06)-differential privacy protects one of them" in evaluation
    assert "examples that did not train the model" in evaluation


def test_a_run_without_privacy_is_not_called_private(tmp_path: Path) -> None:
    plan = dp_sparse.not_private_plan(model_of().optimizer.plan, seed=1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    card = dp_sparse.model_card(dp_sparse.export_model(model, tmp_path / "x"))
    assert "This run has no privacy" in section(card, "Privacy guarantee")
    assert "differential" not in card


def test_the_card_of_a_finished_run(tmp_path: Path) -> None:
    run = dp_sparse.Run(tmp_path / "run", model_of().optimizer.plan)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(dp_sparse.DPSGDOptimizer("sgd", run.plan, clip_norm=1.0), loss="mse")
    model.fit(run.batches(examples()), callbacks=run.callbacks(), verbose=0)
    card = dp_sparse.model_card(run.export(model))
    assert run.statement().splitlines()[1].strip() in card
    run.close()


def test_calibrations_that_the_statement_leaves_out_are_rejected(
    made: tuple[Any, Any], tmp_path: Path
) -> None:
    export, calibration = made
    unpaid = dp_sparse.export_model(model_of(), tmp_path / "unpaid")
    with pytest.raises(ValueError, match="pays for, got one of another plan"):
        dp_sparse.model_card(unpaid, calibration=calibration)
    told = export.statement.replace("deviation 3 ", "deviation 6 ")
    assert told != export.statement
    other = dataclasses.replace(export, statement=told)
    with pytest.raises(ValueError, match="pays for, got one of another plan"):
        dp_sparse.model_card(other, calibration=calibration)
    longer = dataclasses.replace(export, steps=4)
    with pytest.raises(ValueError, match="Expected a calibration of the 4 steps"):
        dp_sparse.model_card(longer, calibration=calibration)
    with pytest.raises(ValueError, match=r"Expected what calibrate_probabilities returned, got"):
        dp_sparse.model_card(export, calibration=calibration.measures)


@pytest.mark.parametrize("export", [None, 3, {}])
def test_what_is_no_export_is_rejected(export: Any) -> None:
    with pytest.raises(ValueError, match="Expected an Export or its folder, got export="):
        dp_sparse.model_card(export)


def test_a_folder_without_an_export_is_rejected(made: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected the folder of an Export"):
        dp_sparse.model_card(tmp_path)


def test_a_changed_statement_is_rejected(tmp_path: Path) -> None:
    export = dp_sparse.export_model(model_of(), tmp_path / "x")
    told = (export.path / "statement.txt").read_text()
    (export.path / "statement.txt").write_text(told.replace("Guarantee", "guarantee"))
    with pytest.raises(ValueError, match="Expected the export that was written"):
        dp_sparse.model_card(export.path)


@pytest.mark.parametrize(
    ("measures", "said"),
    [
        ([("AUC", 0.7)], "Expected not_covered={name: value}"),
        ([], "Expected not_covered={name: value}"),
        ({"": 0.7}, "one line of text"),
        ({" ": 0.7}, "one line of text"),
        ({3: 0.7}, "one line of text"),
        ({"a|b": 0.7}, "one line of text"),
        ({"a\n## Evaluation": 0.7}, "one line of text"),
        ({"a\u2028b": 0.7}, "one line of text"),
        ({"AUC": float("nan")}, "Expected a finite AUC"),
        ({"AUC": float("inf")}, "Expected a finite AUC"),
        ({"AUC": "0.7"}, "Expected a finite AUC"),
        ({"AUC": True}, "Expected a finite AUC"),
        ({"AUC": None}, "Expected a finite AUC"),
    ],
)
def test_bad_measures_are_rejected(made: tuple[Any, Any], measures: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        dp_sparse.model_card(made[0], not_covered=measures)
