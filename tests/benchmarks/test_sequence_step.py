"""Ratios are those of the table, and memory is that of another process."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import sequence_step
from benchmarks.sequence_step import Setting


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LENGTH", 5), ("WIDTH", 4), ("BLOCKS", 1), ("ITEMS", 7), ("WARM_UP", 1)):
        monkeypatch.setattr(sequence_step, name, value)


@pytest.mark.slow
def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(sequence_step, "setting_of", lambda options: Setting(1, 8, 1))
    bytes_of = {"stock": 2**21, "vanilla": 2**22}
    monkeypatch.setattr(sequence_step, "memory_of", lambda setting, way: bytes_of[way])
    lines, metrics = quick_run(sequence_step)
    predicted, batch, _, *shown = (float(cell.replace(",", "")) for cell in lines[1].split())
    stock, vanilla, re_attention, *mebibytes = shown
    assert (predicted, batch) == (1, 8) and mebibytes == [2, 4]
    assert metrics["memory_over_nonprivate"] == 2
    assert metrics["step_over_nonprivate"] == pytest.approx(vanilla / stock, rel=2e-3)
    expected = pytest.approx(re_attention / vanilla, rel=2e-3)
    assert metrics["re_attention_over_vanilla"] == expected


def test_items_are_followed_by_the_next_one() -> None:
    x, y = sequence_step.examples(100, 3)
    assert x.shape == (100, 5) and y.shape == (100, 3) and x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x[:, -2:], y[:, :-1])
    assert x.min() == 1 and 5 < x.max() <= 7


@pytest.mark.slow
def test_memory_grows_with_the_batch() -> None:
    few, many = (sequence_step.memory_of(Setting(1, batch, 1), "stock") for batch in (8, 64))
    assert many > few > 0  # the process has the module's own sizes
