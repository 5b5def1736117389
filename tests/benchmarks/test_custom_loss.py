"""A loss of the model's own costs what a compiled one costs, and CSV files are read fast."""

from collections.abc import Callable

import pytest

pytest.importorskip("pyarrow")

from benchmarks import custom_loss


def test_the_quick_run_has_its_metrics(
    quick_run: Callable[..., tuple[list[str], dict[str, float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(custom_loss, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(custom_loss, "QUICK_ROWS", 2_000)
    _, metrics = quick_run(custom_loss)
    assert metrics.keys() == {
        "custom_over_compiled",
        "sampled_over_in_batch",
        "csv_rows_per_second",
    }
    assert 0.2 < metrics["custom_over_compiled"] < 5
