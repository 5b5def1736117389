"""Each way to draw noise is timed."""

import json
import sys

import pytest

from benchmarks import noise


def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["noise", "--quick"])
    monkeypatch.setattr(noise, "SIDE", 20)
    noise.main()
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert metrics.keys() == {"four_normals_over_fused", "fused_over_one_normal"}
