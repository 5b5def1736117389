"""The results file of a study: a line for each finished run, and none that was cut off."""

from pathlib import Path

from pipelines.finished_runs import FinishedRuns


def test_lines_are_there_at_once_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "runs.jsonl"
    runs = FinishedRuns(path)
    assert runs.lines == [] and not path.exists()
    runs.add({"name": "ε", "auc": 0.5})
    assert path.read_text("utf-8").count("\n") == 1
    runs.add({"name": "b"})
    assert FinishedRuns(path).lines == runs.lines == [{"name": "ε", "auc": 0.5}, {"name": "b"}]


def test_a_line_that_was_cut_off_has_not_ended(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    FinishedRuns(path).add({"name": "a"})
    with path.open("a") as file:
        file.write('{"name": "b", "au')
    again = FinishedRuns(path)
    assert again.lines == [{"name": "a"}]
    again.add({"name": "b"})
    assert FinishedRuns(path).lines == [{"name": "a"}, {"name": "b"}]
