"""Calibration, a table of plans and the first step are timed."""

from collections.abc import Callable

import pytest

import dp_sparse
from benchmarks import planning


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    small = dp_sparse.plan_table
    monkeypatch.setattr(planning, "_ROWS", 10**3)
    monkeypatch.setattr(
        dp_sparse, "plan_table", lambda n, epsilon: small(n, epsilon, batch_sizes=[n / 8])
    )
    _, metrics = quick_run(planning)
    assert metrics.keys() == {
        "calibrate_seconds_median",
        "plan_table_seconds_18",
        "first_step_over_stock",
        "second_fit_over_stock",
    }
