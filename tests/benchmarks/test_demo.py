"""The benchmark reads the demo's own results."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import demo


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    """With made-up results in place of training: of which runs each number is."""
    asked: list[tuple[int, Sequence[tuple[str, float]]]] = []

    def run(data: None, folder: Path, rows: int, runs: Sequence[tuple[str, float]]) -> list[Any]:
        asked.append((rows, runs))
        return [
            SimpleNamespace(
                method=method,
                epsilon=math.inf if method == "non_private" else epsilon,
                auc=0.75 if method == "non_private" else 0.7 + epsilon / 100,
                calibrated_log_loss=0.5 - epsilon / 100 - 0.1 * (method == "dp_adafest"),
                reduction=2000.0 if method == "dp_adafest" else 1.0,
                rate=0.25,
            )
            for method, epsilon in runs
        ]

    monkeypatch.setattr(demo.demo, "run", run)
    lines, metrics = quick_run(demo)
    assert metrics.pop("demo_minutes") < 1
    assert metrics == {
        "demo_adafest_auc": pytest.approx(0.71),
        "demo_log_loss_over_constant": pytest.approx(0.39 / 0.5623, rel=1e-3),
        "demo_auc_below_no_privacy_eps3": pytest.approx(0.02),
        "demo_reduction": 2000.0,
    }
    assert [runs for _, runs in asked] == [demo.demo.RUNS, (("dp_adafest", 3.0),)]
    assert [line.split("  ")[-1].strip() for line in lines[-2:]] == ["2,000", "2,000"]
