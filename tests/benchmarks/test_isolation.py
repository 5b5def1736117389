"""The share of a run that checks take, and one trace more than a step has without them."""

import json
import sys

import pytest

from benchmarks import isolation, pctr_step


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["isolation", "--quick"])
    for module in (isolation, pctr_step):
        monkeypatch.setattr(module, "BATCH", 16)
    isolation.main()
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert metrics.keys() == {"share_of_200_steps", "traces_of_the_model"}
    assert metrics["traces_of_the_model"] == 2
