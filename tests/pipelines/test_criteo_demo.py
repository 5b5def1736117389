"""The demo trains at two budgets and without privacy, after saying how long that takes."""

import functools
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from configs.criteo_sample import get_config
from pipelines.criteo import demo
from pipelines.criteo.generate import generate
from pipelines.criteo.records import load_or_prepare

ROOT = Path(__file__).parents[2]
RUNS = [
    "no privacy",
    "DP-SGD, epsilon=1",
    "DP-AdaFEST, epsilon=1",
    "DP-AdaFEST, epsilon=8",
]
VOCABULARIES = (40, 7) * 13


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROWS", 6_000)
    for function in (generate, load_or_prepare):
        short = functools.partial(function, vocabularies=VOCABULARIES)
        monkeypatch.setattr(demo, function.__name__, short)


def table(printed: str) -> dict[str, float]:
    """AUC by run, from what the demo printed."""
    return {
        name: float(auc)
        for name, auc in re.findall(r"^ *(\S.*?)  (0\.\d{4})  ", printed, re.MULTILINE)
    }


@pytest.mark.slow
def test_made_up_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    first, *_ = printed.splitlines()
    assert first == "4 runs on 6,000 rows: about 3 minutes on 2 cores."
    assert list(table(printed)) == RUNS
    costs = [line for line in printed.splitlines() if "noise on 1 table entry of" in line]
    assert [line.partition(":")[0] for line in costs] == RUNS[2:]
    assert all("no privacy" in line for line in costs)
    assert ["DP-SGD" in line for line in costs] == [True, False]  # which has an ε of its own
    page = (tmp_path / "report.html").read_text()
    assert page.index("<svg") < page.index("<table") < page.index("What is guaranteed")
    assert printed.count("Not covered\n") == page.count("Not covered\n") == 1
    assert "6,000 made-up rows, the last 10% held out" in page
    assert "covered by no epsilon" in page


def test_rows_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "RUNS", (("dp_adafest", 1.0),))
    rows = tmp_path / "rows.tsv"
    generate(5_000, rows, vocabularies=VOCABULARIES, progress=False)
    assert demo.main(["--data", str(rows), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "1 run on 5,000 rows: about 1 minute on 2 cores." in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert "5,000 rows" in page and "made-up" not in page
    assert "covered by no epsilon" not in page


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--data", "nowhere.tsv", "--out", str(tmp_path)]) == 1
    assert "nowhere.tsv" in capsys.readouterr().err


def test_the_time_grows_with_rows_and_passes() -> None:
    config = get_config()
    assert "45,000,000 rows: about 309 minutes" in demo.duration(config, 45_000_000, 3)
    config.training.epochs = 1.0
    assert "45,000,000 rows: about 156 minutes" in demo.duration(config, 45_000_000, 3)


@pytest.mark.slow
def test_all_learn_in_the_time_that_was_said(tmp_path: Path) -> None:
    """Time is that of the processor, halved for two cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pipelines.criteo.demo", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 2
    (said,) = re.findall(r"about (\d+) minutes? on 2 cores", done.stdout)
    assert seconds <= 60 * int(said) <= 360
    auc = table(done.stdout)
    assert list(auc) == RUNS and min(auc.values()) > 0.7
