"""Memory of exports is measured, and is that of one table and parts of it."""

from collections.abc import Callable

import pytest

from benchmarks import export


@pytest.mark.slow
def test_the_quick_run_has_its_metrics(
    quick_run: Callable[..., tuple[list[str], dict[str, float]]],
) -> None:
    """No part of it has a second copy of its 256 MB table."""
    _, metrics = quick_run(export)
    assert metrics.keys() == {
        "export_memory_over_table",
        "delta_memory_over_table",
        "apply_memory_over_table",
        "export_seconds",
        "delta_bytes_over_export",
    }
    peaks = [value for name, value in metrics.items() if "memory" in name]
    assert min(peaks) > 1 and max(peaks) < 1.8
    assert 0 < metrics["delta_bytes_over_export"] < 0.01


@pytest.mark.slow
def test_the_whole_table_takes_at_most_a_fifth_more() -> None:
    """1e7 rows of 64 values: 2.6 GB."""
    found = export.measured(10_000_000)
    for part in ("export", "delta", "apply"):
        assert found[f"{part}_peak"] <= 1.2 * 10_000_000 * 64 * 4, part
