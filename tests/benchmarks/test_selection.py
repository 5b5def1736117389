"""Every method has its line and its metric, and what is counted is what was asked for."""

import json
import sys

import pytest

from benchmarks import one_table, selection


def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["selection", "--quick"])
    monkeypatch.setattr(selection, "SIZES", {"1e5": 260, "1e9": 2600})
    monkeypatch.setattr(one_table, "SIZES", {"1e5": 50, "1e6": 60, "1e7": 70})
    monkeypatch.setattr(one_table, "BATCH", 8)
    monkeypatch.setattr(selection, "SELECTED", 10)
    monkeypatch.setattr(selection, "ROWS_PER_STEP", 5)
    monkeypatch.setattr(selection, "QUICKLY_COUNTED", 1_000)
    selection.main()
    *lines, last = capsys.readouterr().out.splitlines()
    methods = ["adafest", "fest", "adafest_plus", "exponential", "lazy"]
    assert json.loads(last)["metrics"].keys() == {
        "threshold_flatness_1e9_over_1e5",
        "top_k_rows_per_second",
        *(f"{method}_flatness_1e7_over_1e5" for method in methods),
    }
    assert sum(line.split()[0] == "dpsgd" for line in lines) == 2  # 1e7 rows take too long


def test_the_step_is_that_of_the_method() -> None:
    step = one_table.private_step(50, 2, selection.makers(50)["fest"])
    assert {"loss"} <= set(step())
    step()
    with pytest.raises(StopIteration):
        step()
