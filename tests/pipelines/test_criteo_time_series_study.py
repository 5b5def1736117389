"""The experiment on days: its runs, its results file, its page."""

from pathlib import Path

import pytest

pytest.importorskip("apache_beam")

from pipelines.criteo.generate import generate_days
from pipelines.criteo.time_series import study as module
from pipelines.criteo.time_series.page import page
from pipelines.criteo.time_series.study import Point, points, study
from pipelines.finished_runs import FinishedRuns

SMALL = {"hidden": (2,), "training.batch_size": 60, "training.epochs": 1.0, "data.train_days": 2}


def test_all_runs_of_the_table_and_the_figures_are_there() -> None:
    found = points()
    parts = [point.part for point in found]
    assert parts.count("table_5") == 6 * 4
    assert parts.count("figure_5") == 2 * (2 * 3 + 2)
    assert parts.count("figure_6") == 2
    assert len({point.name for point in found}) == len(found)


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_days(3, 120, tmp_path / "days", progress=False)
    data = {"made-up days": str(tmp_path / "days" / "day_*.gz")}
    wanted = [
        Point("table_5", (("method", "non_private"), ("period", 2))),
        Point("figure_5", (("method", "dp_adafest"), ("period", 2))),
    ]
    results = tmp_path / "results.jsonl"
    study(data, FinishedRuns(results), wanted[:1], SMALL)
    results.write_text(results.read_text() + '{"cut off')
    study(data, FinishedRuns(results), wanted, SMALL)
    names = [line["name"] for line in FinishedRuns(results).lines]
    assert names == [point.name for point in wanted]
    monkeypatch.setattr(module, "run", None)
    study(data, FinishedRuns(results), wanted, SMALL)
    page(FinishedRuns(results).lines, tmp_path / "page.md", 42)
    text = (tmp_path / "page.md").read_text()
    assert "2 of 42 runs are finished" in text
    assert "| 2 | not run | not run | not run | 0." in text
    assert "| dp_adafest | 2 |" in text
    assert (tmp_path / "page_made-up_days.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("beside", "shown"),
    [
        ({"log_loss": 0.50006, "mean_prediction": 0.25}, "0.7123 (0.5001, 0.2500)"),
        ({}, "0.7123 (-, -)"),
    ],
    ids=["as the study writes them", "of before these were measured"],
)
def test_the_page_of_finished_runs(tmp_path: Path, beside: dict[str, float], shown: str) -> None:
    result = {"auc": 0.71234, **beside, "epsilon": 1.0, "reduction": 1234.5, "steps": 3}
    lines = [
        {"data": "d", "name": p.name, "part": p.part, "changes": dict(p.changes), "result": result}
        for p in points()
    ]
    page(lines, tmp_path / "page.md", len(lines))
    text = (tmp_path / "page.md").read_text()
    assert f"{len(lines)} of {len(lines)} runs" in text
    assert text.count(" | ".join([shown] * 4) + " |") == 6
    assert f"| dp_fest | 1 | rows 1000, frequencies running | {shown} | 1,234 |" in text
    assert (tmp_path / "page_d.png").stat().st_size > 1000


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--results", str(tmp_path / "r"), "--page", str(tmp_path / "p")]
    assert module.main(["--data", "days", *files]) == 1
    assert "Expected --data NAME=PATTERN" in capsys.readouterr().err
    assert module.main(["--data", f"x={tmp_path}/day_*", *files]) == 1
    assert "a file for each day, got none" in capsys.readouterr().err
