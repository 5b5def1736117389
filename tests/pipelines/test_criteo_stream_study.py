"""Offline Poisson beside a stream: both train on the same rows, within the same budget."""

from pathlib import Path

import pytest

pytest.importorskip("apache_beam")

from pipelines.criteo import stream_study
from pipelines.criteo.generate import generate


@pytest.mark.slow
def test_both_train_within_one_budget(tmp_path: Path) -> None:
    generate(600, tmp_path / "rows.tsv.gz", progress=False)
    changes = {"training.batch_size": 60, "training.evaluations": 1}
    lines, results = stream_study.compare(tmp_path / "rows.tsv.gz", tmp_path, [8.0], changes)
    assert lines == 600
    for _, _, offline, streamed in results:
        assert offline.epsilon == pytest.approx(8.0, abs=0.01)
        assert streamed.epsilon == pytest.approx(8.0, abs=0.01)
        assert "no amplification" in streamed.statement.lower()
    text = stream_study.page(lines, results, 60)
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 8")]
    assert len(rows) == len(stream_study.METHODS)
    for row, (_, _, *both) in zip(rows, results, strict=True):
        noise = [run.report.model.optimizer.plan.noise_multiplier for run in both if run.report]
        assert [float(cell) for cell in row[3:5]] == pytest.approx(noise, abs=1e-3)
        assert [float(cell) for cell in row[5:7]] == pytest.approx([b.auc for b in both], abs=1e-3)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.tsv").write_text("1\t2\n")
    arguments = ["--data", str(tmp_path / "few.tsv"), "--page", str(tmp_path / "page.md")]
    assert stream_study.main(arguments) == 1
    assert "error: Expected 1 <= days <= 1" in capsys.readouterr().err
