"""Whole windows are timed, and memory is that of a sum."""

from collections.abc import Callable

import pytest

from benchmarks import one_table, pctr_step, windowed_selection


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(windowed_selection, "WINDOW", 4)
    monkeypatch.setattr(windowed_selection, "ROWS", 2_000)
    monkeypatch.setattr(windowed_selection, "TABLES", {"1e5": 50, "1e7": 70})
    for module in (one_table, pctr_step):
        monkeypatch.setattr(module, "BATCH", 8)
    lines, metrics = quick_run(windowed_selection)
    assert metrics.keys() == {
        "window_over_plain_step",
        "window_over_plain_step_one_table",
        "window_flatness_1e7_over_1e5",
        "window_memory_over_touched_rows",
    }
    assert [line.strip().split("  ")[0] for line in lines[1:3]] == [
        "pCTR, window 1",
        "pCTR, window 4",
    ]
    assert metrics["window_memory_over_touched_rows"] > 1
