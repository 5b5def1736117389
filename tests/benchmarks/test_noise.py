"""Each way to draw noise is timed."""

from collections.abc import Callable

import pytest

from benchmarks import noise


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    monkeypatch.setattr(noise, "SIDE", 20)
    _, metrics = quick_run(noise)
    assert metrics.keys() == {"four_normals_over_fused", "fused_over_one_normal"}
