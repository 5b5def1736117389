"""A step of one growing table is measured in processes of its own, and drawn."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import table_size


def test_the_quick_run_has_its_metrics(
    quick_run: Callable[..., tuple[list[str], dict[str, float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_size, "QUICK_SIZES", {"1e3": 1000})
    monkeypatch.setattr(table_size, "QUICK_STEPS", 1)
    _, metrics = quick_run(table_size)
    for way in ("keras", "adafest"):  # a table of 1,000 rows fits into memory that was there
        assert metrics[f"{way}_ms_1e3"] > 0 and metrics[f"{way}_mb_1e3"] >= 0


def test_the_picture_has_every_way(tmp_path: Path) -> None:
    found = {(way, size): (0.1, 10**6) for way in table_size.WAYS for size in table_size.SIZES}
    table_size.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    metrics = table_size._metrics(found, table_size.SIZES)
    assert metrics["memory_over_adafest_1e7"] == 1.0
