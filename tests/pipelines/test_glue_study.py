"""The study of the word table: what runs next, what is chosen, what the page says."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from configs import glue_language
from pipelines.finished_runs import FinishedRuns
from pipelines.glue import study
from pipelines.runs import flattened
from tests.pipelines.glue_files import small, sst2_folder

OF_METHOD = {
    "DP-SGD": 0.90,
    "DP-AdaFEST": 0.898,
    "frozen words": 0.89,
    "DP-FEST": 0.88,
    "without privacy": 0.92,
}
METHODS, PRIVATE, TRIED = 5, 4, len(glue_language.RATES)
SETTINGS = PRIVATE * TRIED + 1


def finished(point: study.Point, held_out: float | None = None) -> dict[str, Any]:
    """A made-up line; the second rate is better on validation rows and worse on the others."""
    second = point["setting"]["optimizer.learning_rate"] == glue_language.RATES[1]
    value = OF_METHOD[point["method"]] if held_out is None else held_out
    value += 0.001 * point["seed"]
    found = {"validation": value + 0.01 * second, "held_out": value - 0.02 * second, "dev": value}
    reduction = {"DP-AdaFEST": 22.5, "DP-FEST": 10.2, "frozen words": None}.get(point["method"], 1)
    line = {"accuracy": found, "steps": 27, "reduction": reduction}
    return {**point, **line, "training_rows": 57}


@pytest.fixture
def config() -> Any:
    return glue_language.get_config()


def test_settings_come_first_then_seeds_then_other_budgets(config: Any, tmp_path: Path) -> None:
    results = FinishedRuns(tmp_path / "language.jsonl")
    done = []
    while point := next(study.missing(config, results), None):
        assert study.result_of(results, point) is None
        results.add(finished(point))
        done.append(point)
    assert len(done) == SETTINGS + 2 * METHODS + 2 * 3 * PRIVATE
    assert [p["method"] for p in done[:METHODS]] == sorted(OF_METHOD)
    assert {(p["epsilon"], p["seed"]) for p in done[:SETTINGS]} == {(3.0, 0), (None, 0)}
    rates = {p["setting"]["optimizer.learning_rate"] for p in done[SETTINGS:]}
    assert rates == set(glue_language.RATES[:2])  # the first one of what has no second
    private = [p for p in done[SETTINGS:] if p["epsilon"] is not None]
    assert {p["setting"]["optimizer.learning_rate"] for p in private} == {glue_language.RATES[1]}
    assert [p["epsilon"] for p in done[-3 * PRIVATE :]] == [8.0] * 3 * PRIVATE
    again = FinishedRuns(tmp_path / "language.jsonl")
    assert again.lines == results.lines and not list(study.missing(config, again))


def test_a_line_that_was_cut_off_runs_again(config: Any, tmp_path: Path) -> None:
    path = tmp_path / "language.jsonl"
    results = FinishedRuns(path)
    for _ in range(2):
        results.add(finished(next(study.missing(config, results))))
    path.write_text(path.read_text()[:-5])
    cut = FinishedRuns(path)
    assert len(cut.lines) == 1 and next(study.missing(config, cut))["method"] == "DP-FEST"
    cut.add(finished(next(study.missing(config, cut))))
    assert FinishedRuns(path).lines == results.lines


def test_a_run_changes_the_base_by_its_point(config: Any) -> None:
    config.data.path, config.directory = "somewhere", "runs/x"
    point = list(study.missing(config, FinishedRuns(Path("nowhere"))))[3]
    own = study.run_config(config, {**point, "epsilon": 1.0, "seed": 2})
    assert (own.model.words, own.method) == ("frozen", "dp_sgd")
    assert (own.privacy.epsilon, own.seed) == (1.0, 2)
    assert own.data.path == "somewhere" and own.report.directory.startswith("runs/x/frozen-words_")
    directories = {
        study.run_config(config, point).report.directory
        for point in study.missing(config, FinishedRuns(Path("nowhere")))
    }
    assert len(directories) == SETTINGS


def run_all(
    config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> tuple[list[str], str]:
    """What failed, and the page."""
    monkeypatch.setattr(study, "in_own_process", lambda _, __, point: run(point))
    results = FinishedRuns(folder / "language.jsonl")
    failed = study.run_all(config, results, folder / "language.md")
    study.write_page(config, results, folder / "language.md")
    return failed, (folder / "language.md").read_text()


def test_the_page_compares_pairs_and_answers(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, page = run_all(config, tmp_path, monkeypatch, finished)
    assert not failed and "Unfinished" not in page
    assert "| 3 | DP-SGD | 3 | 88.10 % ± 0.10 |  | 90.10 % ± 0.10 | 1.0× |" in page
    line = "| 3 | DP-AdaFEST | 3 | 87.90 % ± 0.10 | -0.20 ± 0.00 | 89.90 % ± 0.10 | 22.5× |"
    assert line in page and "no gradient" in page
    assert "- Is DP-AdaFEST within 0.5 points of DP-SGD? Yes: -0.20 ± 0.00 points." in page
    assert "beat freezing it? Yes: +0.80 ± 0.00 points." in page
    assert "22.5 times smaller" in page
    elsewhere = "minus frozen words elsewhere: +0.80 ± 0.00 at ε = 1, +0.80 ± 0.00 at ε = 8."
    assert elsewhere in page and "not known yet" not in page


def test_the_page_says_no(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(point: study.Point) -> dict[str, Any]:
        noisy = (point["method"], point["epsilon"]) == ("DP-SGD", 1.0)
        sparse = point["method"] == "DP-AdaFEST"
        return finished(point, 0.80 if noisy else 0.85 if sparse else None)

    _, page = run_all(config, tmp_path, monkeypatch, worse)
    assert "within 0.5 points of DP-SGD? No: -5.00" in page
    assert "beat freezing it? No: -4.00" in page
    assert "From ε = 8 to ε = 1 accuracy moves by these points: DP-AdaFEST +0.00 ± 0.00" in page
    assert "DP-SGD -10.00 ± 0.00" in page and "the 27 steps are the limit" in page


def test_a_reduction_that_no_process_saw_is_unknown(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a run that was killed between its last step and its line."""

    def once(point: study.Point) -> dict[str, Any]:
        killed = (point["method"], point["seed"]) == ("DP-AdaFEST", 1)
        reduction = study._for_json(math.nan) if killed else None
        return finished(point) | ({"reduction": reduction} if killed else {})

    _, page = run_all(config, tmp_path, monkeypatch, once)
    lines = [json.loads(line) for line in (tmp_path / "language.jsonl").read_text().splitlines()]
    assert "unknown" in [line["reduction"] for line in lines] and "nan" not in page.lower()
    assert "-0.20 ± 0.00 | 89.90 % ± 0.10 | 22.5× |" in page and "22.5 times smaller" in page


def test_results_of_another_base_are_refused(config: Any, tmp_path: Path) -> None:
    path = tmp_path / "language.jsonl"
    results = study.results_in(path, config)
    results.add(finished(next(study.missing(config, results))))
    config.base.data.path, config.base.report.verbose = "elsewhere", 1
    config.base.optimizer.learning_rate = 1.0  # each setting has its own
    assert study.results_in(path, config).lines == results.lines
    config.base.training.epochs = 3.0
    with pytest.raises(ValueError, match="got 1 of others among 1: name another file"):
        study.results_in(path, config)


def test_the_command_runs_what_is_missing_and_names_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.delenv("TF_NUM_INTEROP_THREADS", raising=False)

    def in_process(run: Any, config: Any, point: study.Point) -> dict[str, Any]:
        assert run is study.run_point and (config.data.path, config.directory) == ("SST-2", "runs")
        assert os.environ["TF_NUM_INTRAOP_THREADS"] == os.environ["TF_NUM_INTEROP_THREADS"] == "1"
        if point["method"] == "DP-FEST":
            raise ValueError("out of luck")
        return finished(point)

    monkeypatch.setattr(study, "in_own_process", in_process)
    paths = [f"--results={tmp_path / 'x.jsonl'}", f"--page={tmp_path / 'page.md'}"]
    assert study.main([*paths, "--data=SST-2", "--directory=runs", "--threads=1"]) == 1
    assert capsys.readouterr().err.count("failed: DP-FEST_3.0_") == TRIED
    assert "Is DP-AdaFEST within 0.5 points" in (tmp_path / "page.md").read_text()


def test_a_run_that_fails_is_named_and_the_others_go_on(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sometimes(point: study.Point) -> dict[str, Any]:
        if point["method"] == "DP-SGD":
            raise ValueError("out of luck")
        return finished(point)

    failed, page = run_all(config, tmp_path, monkeypatch, sometimes)
    assert len(failed) == TRIED and all("ValueError: out of luck" in line for line in failed)
    assert f"Unfinished: {TRIED} runs are missing" in page and "Not known yet: 0 of 3 seeds" in page


def test_the_page_before_anything_is_finished(tmp_path: Path) -> None:
    paths = [f"--results={tmp_path / 'x.jsonl'}", f"--page={tmp_path / 'page.md'}"]
    assert study.main(paths) == 0
    page = (tmp_path / "page.md").read_text()
    assert f"Unfinished: {SETTINGS} runs are missing" in page
    assert "No setting is chosen yet" in page and "None is finished yet" in page


def test_the_page_in_docs_is_that_of_the_results(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs" / "results"
    page = tmp_path / "page.md"
    study.main([f"--results={docs / 'language.jsonl'}", f"--page={page}"])
    assert page.read_text() == (docs / "language.md").read_text()


@pytest.mark.slow
def test_a_point_trains_and_goes_on(config: Any, tmp_path: Path) -> None:
    sst2_folder(tmp_path)
    base = small(tmp_path, **{"data.held_out": 9, "data.validation": 5})
    config.base = base
    config.data.path, config.directory = str(tmp_path), str(tmp_path / "runs")
    point = next(study.missing(config, FinishedRuns(tmp_path / "language.jsonl")))
    line = json.loads(json.dumps(study.run_point(config, point)))
    assert {name: line[name] for name in point} == point
    assert set(line["accuracy"]) == {"dev", "held_out", "validation"}
    assert point["method"] == "DP-AdaFEST" and line["reduction"] > 1.0
    assert line["steps"] == round(line["training_rows"] / 16)
    assert flattened(study.run_config(config, point))["privacy.epsilon"] == 3.0
