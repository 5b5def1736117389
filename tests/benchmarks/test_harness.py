"""Medians in turns, and the form of a benchmark's last line."""

import datetime
import json
import os
import re
import subprocess
import time
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from benchmarks import harness


def test_medians_are_taken_in_turns() -> None:
    calls = []
    seconds = harness.in_turns(
        {"a": lambda: calls.append("a"), "b": lambda: (calls.append("b"), time.sleep(0.01))},
        rounds=3,
        warm_up=1,
    )
    assert calls == ["a", "b"] * 4
    assert seconds["b"] >= 0.01 > seconds["a"]


def report(*arguments: str) -> None:
    options = harness.parser("").parse_args(arguments)
    harness.report("name", ("x", "y"), [(1, 2.0)], {"key": 0.123456}, options)


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    report("--quick")
    *table, last = capsys.readouterr().out.splitlines()
    line = json.loads(last)
    assert (line["benchmark"], line["metrics"], line["quick"]) == ("name", {"key": 0.1235}, True)
    assert table[0].split() == ["x", "y"]


def test_the_last_line_says_where_it_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    report()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["quick"] is False
    assert line["machine"]["cpu"] and line["machine"]["cores"] == os.cpu_count()
    date = datetime.datetime.fromisoformat(line["date"])
    assert before <= date <= datetime.datetime.now(datetime.UTC)
    assert line["versions"] == {"tensorflow": tf.__version__, "keras": keras.__version__}


def test_lines_are_appended_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text('{"earlier": 1}\n')
    report("--out", str(results))
    *table, printed = capsys.readouterr().out.splitlines()
    earlier, line = map(json.loads, results.read_text().splitlines())
    assert earlier == {"earlier": 1}
    assert len(table) == 2 and line == {**json.loads(printed), "printed": table}


def commit_of_report(capsys: pytest.CaptureFixture[str]) -> str:
    report()
    return json.loads(capsys.readouterr().out.splitlines()[-1])["commit"]


def test_the_commit_has_a_plus_when_files_differ_but_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of_report(capsys) == "unknown"
    (tmp_path / "benchmarks").mkdir()
    code, results = tmp_path / "code.py", tmp_path / "benchmarks" / "results.jsonl"
    code.touch()
    results.touch()
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init",), ("add", "."), (*author, "commit", "-m", "first")):
        subprocess.run(["git", "-C", tmp_path, *command], check=True, capture_output=True)
    results.write_text("{}")
    short = commit_of_report(capsys)
    assert re.fullmatch(r"[0-9a-f]{7,}", short)
    code.write_text("1")
    assert commit_of_report(capsys) == f"{short}+"
