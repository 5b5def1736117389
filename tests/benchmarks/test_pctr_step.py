"""A private step and a stock one take the same batches, and each size has its ratio."""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import pctr_step

SIZES = {"1e5": 100, "1e6": 200, "1e7": 400}


def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(pctr_step, "BATCH", 16)
    monkeypatch.setattr(pctr_step, "TABLE3_VOCABULARIES", (40, 60))
    monkeypatch.setattr(pctr_step, "pctr", functools.partial(pctr_step.pctr, hidden=(8,)))
    monkeypatch.setattr(pctr_step, "SIZES", SIZES)
    monkeypatch.setattr(pctr_step, "QUICK_ROUNDS", dict.fromkeys(SIZES, 1))
    lines, metrics = quick_run(pctr_step)
    assert metrics.keys() == {f"private_over_stock_{name}" for name in SIZES}
    assert [line.split()[0] for line in lines[1:]] == ["100", "200", "400"]
    for line, ratio in zip(lines[1:], metrics.values(), strict=True):
        _, private, stock, _ = (float(cell.replace(",", "")) for cell in line.split())
        assert ratio == pytest.approx(private / stock, rel=2e-3)


def test_vocabularies_keep_their_proportions() -> None:
    sizes = pctr_step.vocabularies(10**6)
    assert len(sizes) == 26 and min(pctr_step.vocabularies(10**5)) == 3
    assert sum(sizes) == pytest.approx(10**6, rel=1e-3)
    ratio = np.divide(pctr_step.vocabularies(10**7), sizes)[np.array(sizes) > 1_000]
    np.testing.assert_allclose(ratio, 10, rtol=1e-3)


def test_ids_are_within_their_tables() -> None:
    x, y = pctr_step.examples([3, 50], 1_000)
    assert x["categories"].shape == (1_000, 2) and x["integers"].shape == (1_000, 13)
    assert x["categories"].min() == 0 and list(x["categories"].max(axis=0)) == [2, 49]
    assert set(np.unique(y)) == {0, 1}
