"""The experiment on days: its runs, its results file, its page."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("apache_beam")

from configs import criteo_time_series_study
from configs.criteo_time_series_study import MADE_UP, SLICES
from pipelines import points
from pipelines.criteo.generate import generate_days
from pipelines.criteo.time_series import page, study

SMALL = {"hidden": (2,), "training.batch_size": 60, "training.epochs": 1.0, "data.train_days": 2}


def test_every_point_changes_keys_that_exist() -> None:
    config = criteo_time_series_study.get_config()
    runs = list(points.runs_of(config.points))
    assert len({json.dumps(run, sort_keys=True) for run, _ in runs}) == len(runs)
    for run, changes in runs:
        own = points.run_config(config.base, run, changes)
        assert f"period {own.period}" in run["name"] and own.seed == run["seed"]
    table = [run for run, _ in runs if run["name"].startswith(("no privacy", "DP-SGD"))]
    assert len({(run["name"], run["epsilon"]) for run in table}) == 3 * 4


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_days(3, 120, tmp_path / "days", progress=False)
    monkeypatch.setattr(study, "in_own_process", lambda function, *given: function(*given))
    config = criteo_time_series_study.get_config()
    config.base.update_from_flattened_dict(SMALL)
    wanted = ("no privacy, period 18", "DP-AdaFEST, λ=10, period 18")
    own = [
        {**p, "seeds": (0,), "changes": {**p["changes"], "period": 2}}
        for p in config.points
        if p["name"] in wanted and p["group"] == MADE_UP
    ]
    written, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    days = {MADE_UP: str(tmp_path / "days" / "day_*.gz")}

    def run(count: int) -> list[dict[str, Any]]:
        config.points = tuple(own[:count])
        found = study.results_in(results, config)
        assert study.run_all(config, days, found, written, 60.0) == 0
        return found.lines

    run(1)
    results.write_text(results.read_text() + '{"cut off')
    lines = run(2)
    assert [line["name"] for line in lines] == list(wanted)
    assert lines[1]["reduction"] > 1 and lines[1]["spent"] <= 1.0
    monkeypatch.setattr(study, "in_own_process", None)  # nothing is left to run
    assert run(2) == lines
    text = written.read_text()
    assert "are missing" not in text and "| 18 | not run | not run | not run | 0." in text
    assert "| DP-AdaFEST, λ=10 | 18 |" in text
    assert (tmp_path / "time_series_made-up_days.png").stat().st_size > 1000


def test_the_page_of_finished_runs(tmp_path: Path) -> None:
    config = criteo_time_series_study.get_config()
    result = {"log_loss": 0.50006, "mean_prediction": 0.25, "spent": 1.0, "steps": 3}
    lines = [
        {**run, **result, "auc": 0.7 + 0.001 * run["seed"], "reduction": 1234.5}
        for run, _ in points.runs_of(config.points)
    ]
    page.write_page(config, lines, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "are missing" not in text
    assert "| 4 | " + " | ".join(["0.7000 (0.5001)"] * 4) + " |" in text
    assert "| 18 | 0.7010 ± 0.0010 (0.5001) | 0.7000 (0.5001) |" in text
    assert "| DP-FEST, k=300, running | 18 | 0.7010 ± 0.0010 (0.5001) | 1,234 |" in text
    assert (tmp_path / "time_series_slices_of_the_sample.png").stat().st_size > 1000
    assert "missing: 1 " in page.page_of(config, lines[:-1])


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--results", str(tmp_path / "r"), "--page", str(tmp_path / "p")]
    assert study.main([f"--made-up={tmp_path}/day_*", *files]) == 1
    assert "a file for each day, got none" in capsys.readouterr().err
    (tmp_path / "r").write_text(json.dumps({"group": SLICES}) + "\n")
    assert study.main(files) == 1
    assert "Expected runs of these settings" in capsys.readouterr().err
