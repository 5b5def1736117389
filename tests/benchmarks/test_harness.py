"""Medians in turns, and the form of a benchmark's last line."""

import json
import time

import pytest

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


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    harness.report("name", ("x", "y"), [(1, 2.0)], {"key": 0.123456})
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"benchmark": "name", "metrics": {"key": 0.1235}}
    assert table[0].split() == ["x", "y"]
