"""Runs of next-item models spend once, go on, and are refused before they spend."""

import gc
from pathlib import Path
from typing import Any

import keras
import ml_collections
import numpy as np
import pytest

import dp_sparse
from pipelines.movielens import run
from pipelines.sequences import plans
from pipelines.sequences.examples import SequenceExamples
from pipelines.sequences.train import check
from tests.pipelines.interaction_files import ITEMS, circles, small


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return circles(tmp_path)


class TestGoingOn:
    def begin(self, path: Path, folder: Path) -> ml_collections.ConfigDict:
        """A run of Re-Attention that ends in an error after the first of its two epochs."""
        config = small(path)
        config.report.directory = str(folder)

        def killed(model: keras.Model, users: Any) -> Any:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "scores", killed)
            with pytest.raises(KeyboardInterrupt):
                run.run(config, plans.run_of(config, resume=False, monitor=0))
        gc.collect()  # its lock of the folder goes with it, as with a process
        return config

    def test_a_run_spends_its_plan_once(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Frequencies are counted once, and only the steps that are left are taken."""
        config = self.begin(path, tmp_path / "run")
        counted = (tmp_path / "run" / "frequencies.npz").read_bytes()
        with pytest.raises(ValueError, match="pass --resume to go on with it"):
            plans.run_of(config, resume=False, monitor=0)
        monkeypatch.delattr(dp_sparse, "noisy_frequencies")
        monkeypatch.delattr(dp_sparse, "calibrate_top_k")
        result = run.run(config, plans.run_of(config, resume=True, monitor=0))
        assert result.steps == 4 and list(result.curve) == [2]
        assert int(result.model.optimizer.steps_spent) == 4
        assert "after 4 of 4 steps" in result.statement
        assert (tmp_path / "run" / "frequencies.npz").read_bytes() == counted
        page = (tmp_path / "run" / "report.html").read_text()
        assert "The first 2 steps were taken before this report began" in page
        scored = result.curve[2]
        del result  # and its lock of the folder
        gc.collect()
        again = run.run(config, plans.run_of(config, resume=True, monitor=0))
        assert again.steps == 4 and again.curve[2] == scored

    def test_lost_frequencies_are_not_counted_again(self, path: Path, tmp_path: Path) -> None:
        config = self.begin(path, tmp_path / "run")
        (tmp_path / "run" / "frequencies.npz").unlink()
        with pytest.raises(
            ValueError, match="frequencies.npz is missing, which the plan of this run"
        ):
            run.run(config, plans.run_of(config, resume=True, monitor=0))

    def test_a_run_that_keeps_nothing_cannot_go_on(self, path: Path) -> None:
        config = small(path)
        assert plans.run_of(config, resume=False, monitor=0) is None
        for resume, monitor in ((True, 0), (False, 5)):
            with pytest.raises(ValueError, match="Expected a private method and a report.dir"):
                plans.run_of(config, resume, monitor)

    def test_steps_whose_weights_were_lost_stay_spent(self, path: Path, tmp_path: Path) -> None:
        """Both weights of a step may have been seen, those that were lost and those before."""
        config = self.begin(path, tmp_path / "run")
        run.run(config, plans.run_of(config, resume=True, monitor=0))
        gc.collect()
        newest = tmp_path / "run" / "checkpoints" / "step-000000004.weights.h5"
        newest.write_bytes(newest.read_bytes()[:1000])
        with pytest.warns(UserWarning, match="step-000000004.weights.h5 is left out"):
            result = run.run(config, plans.run_of(config, resume=True, monitor=0))
        assert int(result.model.optimizer.iterations) == 2
        assert result.steps == 4 and "after 4 of 4 steps" in result.statement


REFUSED: dict[str, Any] = {
    "model.kind": "mamba",
    "model.heads": 3,
    "optimizer.weight_decay": 2.0,
    "optimizer.learning_rate": -1.0,
    "privacy.clip_norm": -1.0,
    "privacy.method": "dp-sgd",
    "training.score_every": -1,
    "training.microbatch_size": -1,
    "data.filter_items": 1,
}


@pytest.mark.parametrize("setting", REFUSED)
@pytest.mark.parametrize("filter_items", [0, 30])
def test_what_is_refused_has_counted_nothing(
    path: Path, tmp_path: Path, setting: str, filter_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the directory may have a run with a corrected config, which counts once."""
    config = small(path, filter_items=filter_items)
    config.update_from_flattened_dict({setting: REFUSED[setting]})
    config.report.directory = str(tmp_path / "run")
    monkeypatch.delattr(dp_sparse, "noisy_frequencies")
    with pytest.raises(ValueError, match=setting.split(".")[1]):
        run.run(config, plans.run_of(config, resume=False, monitor=0))
    assert not (tmp_path / "run" / "run.json").exists()


def test_runs_of_many_steps_are_not_refused(path: Path) -> None:
    """Of which a noise multiplier of 1 has no ε."""
    config = small(path)
    config.training.epochs = 60
    check(config, SequenceExamples(np.ones((40, 4), np.int32), np.ones((40, 3), np.int32), ITEMS))
