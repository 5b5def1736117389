"""Each way is a process of its own, and the ratios are those of the table."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import freed_memory
from benchmarks.sequence_step import Setting

MEASURED = {
    ("stock", False): (3.0, 1024),
    ("stock", True): (2.0, 2048),
    ("vanilla", False): (6.0, 3072),
}


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    def timed(function: Any, setting: Setting, way: str, kept: bool) -> tuple[float, int]:
        assert function is freed_memory.measured
        return MEASURED.get((way, kept), (2.5, 4608))

    monkeypatch.setattr(freed_memory, "in_own_process", timed)
    lines, metrics = quick_run(freed_memory)
    assert lines[2].split() == ["vanilla", "6,000", "2,500", "2.4", "3", "4.5"]
    assert metrics == {
        "stock_given_back_over_kept": 1.5,
        "vanilla_given_back_over_kept": 2.4,
        "stock_memory_kept_over_given_back": 2.0,
        "vanilla_memory_kept_over_given_back": 1.5,
        "private_over_stock_given_back": 2.0,
        "private_over_stock_kept": 1.25,
    }


def test_a_step_is_timed_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "STEPS", 1)
    monkeypatch.setattr(freed_memory, "WARM_UP", 1)
    monkeypatch.setenv(freed_memory.ALLOCATOR, "")
    seconds, kib = freed_memory.measured(Setting(1, 2, 1), "stock", False)
    assert seconds > 0 and kib > 100_000  # of TensorFlow alone
