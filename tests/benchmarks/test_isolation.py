"""The part of a run that checks take, and one trace more than a step has without them."""

from collections.abc import Callable

import pytest

from benchmarks import isolation, pctr_step


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    for module in (isolation, pctr_step):
        monkeypatch.setattr(module, "BATCH", 16)
    _, metrics = quick_run(isolation)
    assert metrics.keys() == {"checks_share", "traces_of_the_model"}
    assert metrics["traces_of_the_model"] == 2
