"""A grid of plans: each as `PrivacyPlan` calibrates it, as text, CSV, a plot and a command."""

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from dp_sparse.__main__ import main
from dp_sparse.accounting import PrivacyBudget, PrivacyPlan, plan_table
from dp_sparse.accounting.plan_table import PlanTable, _default_sizes
from dp_sparse.sampling import PoissonSampling


@pytest.fixture(scope="module")
def table() -> PlanTable:
    return plan_table(10_000, 2.0, batch_sizes=[100, 1000], epochs=[1, 5])


@pytest.mark.slow
def test_every_row_is_a_calibrated_plan(table: PlanTable) -> None:
    assert [(row.batch_size, row.epochs) for row in table.rows] == [
        (100, 1),
        (1000, 1),
        (100, 5),
        (1000, 5),
    ]
    row = table.rows[3]
    sampling = PoissonSampling(10_000, 1000, steps=50)
    plan = PrivacyPlan(PrivacyBudget(2.0, 1e-4), sampling).calibrate()
    assert row.steps == 50
    assert plan.noise_multiplier <= row.noise_multiplier <= plan.noise_multiplier + 2e-3
    assert 1.99 < row.epsilon <= 2.0
    more = dataclasses.replace(plan, noise_multiplier=row.noise_multiplier)
    assert more.spent(50).epsilon <= row.epsilon
    assert row.noise == pytest.approx(row.noise_multiplier / 1000)
    assert row.signal_to_noise == pytest.approx(math.sqrt(50) * 1000 / row.noise_multiplier)


@pytest.mark.slow
def test_as_csv_and_text(table: PlanTable) -> None:
    found = list(csv.DictReader(table.csv().splitlines()))
    assert [float(row["epsilon"]) for row in found] == [row.epsilon for row in table.rows]
    lines = str(table).splitlines()
    assert lines[0] == "10,000 examples, epsilon=2, delta=0.0001, Poisson sampling"
    assert [line.split()[2] for line in lines[2:6]] == ["100", "10", "500", "50"]
    assert len({len(line) for line in lines[1:6]}) == 1


def test_a_plot(table: PlanTable, tmp_path: Path) -> None:
    table.plot(tmp_path / "plans.png")
    assert (tmp_path / "plans.png").read_bytes()[:4] == b"\x89PNG"
    table.plot(tmp_path / "plans.svg")
    assert "5 epochs" in (tmp_path / "plans.svg").read_text()


@pytest.mark.parametrize(("examples", "last"), [(10, 2), (1000, 128), (45_000_000, 2**23)])
def test_batch_sizes_by_default(examples: int, last: int) -> None:
    sizes = _default_sizes(examples)
    assert sizes[-1] == last <= examples / 4 < 2 * last
    assert len(sizes) <= 6 and sizes == sorted(sizes) and sizes[0] >= 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--examples=5e3", "--epsilon=4", "--batch-size", "500", "--epochs", "2"]
    assert main([*arguments, f"--plot={tmp_path / 'plans.svg'}"]) == 0
    assert "5,000 examples, epsilon=4, delta=0.0002" in capsys.readouterr().out
    assert (tmp_path / "plans.svg").exists()
    assert main([*arguments, "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("500.0,2.0,20,")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("--examples=10.5", "Expected num_examples to be a whole number > 0, got"),
        ("--examples=0", "Expected num_examples to be a whole number > 0, got"),
        ("--epsilon=-1", "Expected epsilon > 0 and finite, got epsilon=-1"),
        ("--batch-size=9000", "Expected expected_batch_size <= num_examples=5000"),
        ("--epochs=0", "Expected epochs > 0 and finite, got epochs=0"),
        ("--plot=/proc/plans.png", "No such file"),
    ],
)
def test_wrong_arguments(changed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--examples=5000", "--epsilon=4", "--batch-size=500", "--epochs=2"]
    assert main([*arguments, changed]) == 1
    found = capsys.readouterr()
    assert said in found.err and not found.out and found.err.count("\n") == 1


@pytest.mark.parametrize("name", ["batch_sizes", "epochs"])
@pytest.mark.parametrize("wrong", [[], 500, "500"])
def test_what_is_no_list_of_numbers(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected {name} to be a list of numbers to try, got"):
        plan_table(1000, 1.0, **{name: wrong})
