"""The recipe is compared with the best of the study, on the study's own tasks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import recipes
from pipelines.defaults.settings import DP_SGD, Setting


@pytest.mark.skipif("DP_SPARSE_DATA" not in os.environ, reason="no data: set DP_SPARSE_DATA")
def test_the_quick_run_has_its_metrics(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    """With scores in place of training: what is trained, and against which best."""
    settings: list[Setting] = []

    def trained(task: object, setting: Setting, epsilon: float) -> dict[str, float]:
        settings.append(setting)
        score = {"ranking": 0.6, "images": 0.8}[task.name]  # type: ignore[attr-defined]
        return {"test": score, "test_log_loss": 0.5}

    monkeypatch.setattr(recipes, "run", trained)
    monkeypatch.setattr(recipes, "TASKS", ("ranking", "images"))
    _, metrics = quick_run(recipes)
    assert metrics == {
        "recipe_share_of_gain_ranking": pytest.approx(0.1 / 0.1941, rel=0.05),
        "recipe_share_of_gain_images": pytest.approx(0.6865 / 0.8274, rel=0.05),
    }
    assert {setting.method for setting in settings} == {DP_SGD}


def test_without_data_it_says_that_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DP_SPARSE_DATA", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["recipes", "--quick"])
    recipes.main()
    said = capsys.readouterr()
    assert said.err.startswith("Left out, set DP_SPARSE_DATA: there is no ")
    assert "mnist.npz" in said.err and not said.out
