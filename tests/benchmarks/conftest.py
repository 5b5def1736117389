"""Runs a benchmark as its command does, quickly."""

import json
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

QuickRun = Callable[[ModuleType], tuple[list[str], dict[str, float]]]


@pytest.fixture
def quick_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> QuickRun:
    """From a benchmark's module to the lines of its table and the metrics of its last line."""

    def run(module: ModuleType) -> tuple[list[str], dict[str, float]]:
        monkeypatch.setattr(sys, "argv", [module.__name__, "--quick"])
        monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "")  # some set it, for their process
        module.main()
        *lines, last = capsys.readouterr().out.splitlines()
        result = json.loads(last)
        assert result["benchmark"] == module.__name__.removeprefix("benchmarks.")
        assert result["quick"] is True
        return lines, result["metrics"]

    return run
