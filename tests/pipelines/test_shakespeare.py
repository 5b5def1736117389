"""The character model: windows of a text, its scores, and whole runs."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_collections
import numpy as np
import pytest

from configs import shakespeare, shakespeare_small
from pipelines.sequences.examples import SequenceExamples
from pipelines.shakespeare import text
from pipelines.shakespeare.run import run, scores

ROOT = Path(__file__).parents[2]


def small(tmp_path: Path, written: str) -> ml_collections.ConfigDict:
    config, path = shakespeare.get_config(), tmp_path / "text.txt"
    path.write_text(written, encoding="utf-8")
    config.data.update({"path": str(path), "length": 7, "held_out_fraction": 0.25})
    config.model.update({"width": 8, "heads": 2, "blocks": 1, "dropout": 0.0})
    config.training.update({"epochs": 1, "batch_size": 16, "microbatch_size": 0, "score_every": 0})
    config.report.directory = ""
    return config


def test_windows_do_not_overlap_and_the_end_is_held_out(tmp_path: Path) -> None:
    written = "".join(map(chr, range(40, 104)))
    found = text.load(small(tmp_path, written).data)
    whole = np.concatenate([found.training.x, found.training.y[:, -1:]], axis=1)
    assert whole.ravel().tolist() == text.encoded(written)[:48].tolist()
    assert found.held_out.x[0, 0] == text.encoded(written)[48]
    np.testing.assert_array_equal(found.training.x[:, 1:], found.training.y[:, :-1])


def test_characters_outside_the_set_are_counted(tmp_path: Path) -> None:
    found = text.load(small(tmp_path, "to be\n" * 20 + "é€\t").data)
    assert found.left_out == 3
    assert text.encoded("\n ~").tolist() == [1, 2, 96] and found.training.num_tokens == 96


def test_a_missing_or_short_text_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, "to be or not")
    with pytest.raises(text.TextError, match="at least two windows of 8 .*got 12 characters"):
        text.load(config.data)
    for path in ("nowhere.txt", ""):
        config.data.path = path
        with pytest.raises(text.TextError, match=f"a text file, got data.path='{path}': pass"):
            text.load(config.data)


@pytest.mark.parametrize("change", [{"held_out_fraction": 1.5}, {"length": 0}])
def test_settings_out_of_their_range_are_refused(change: Any, tmp_path: Path) -> None:
    config = small(tmp_path, "to be or not to be " * 20)
    config.data.update(change)
    (name,) = change
    with pytest.raises(text.TextError, match=f"Expected 0 < .*data.{name}={change[name]}"):
        text.load(config.data)


def test_scores_are_means_over_characters() -> None:
    labels = np.array([[1, 2], [3, 3], [1, 1]], np.int32)
    logits = np.zeros((3, 2, 4), np.float32)
    logits[..., 0] = 50  # padding, which is no character
    logits[0, 0, 1] = np.log(2)
    model: Any = SimpleNamespace(predict_on_batch=lambda x: logits[: len(x)])
    found = scores(model, SequenceExamples(labels, labels, 3))
    assert found["loss"] == pytest.approx((5 * np.log(3) + np.log(2)) / 6)
    assert found["accuracy"] == pytest.approx(3 / 6)  # of equal logits the first is taken


@pytest.mark.slow
def test_a_private_run(tmp_path: Path) -> None:
    result = run(small(tmp_path, "the cat sat on the mat. " * 40))
    assert result.epsilon <= 8 and 0 < result.loss < 10 and 0 <= result.accuracy <= 1
    assert result.statement.startswith("An example is a window of 8 characters")


def test_the_small_config_is_the_large_one_with_smaller_sizes() -> None:
    large, little = shakespeare.get_config(), shakespeare_small.get_config()
    assert json.loads(large.to_json()).keys() == json.loads(little.to_json()).keys()
    assert little.model.width < large.model.width and little.data.length < large.data.length


@pytest.mark.slow
def test_a_run_without_privacy_learns_the_text(tmp_path: Path) -> None:
    config = small(tmp_path, "the cat sat on the mat. " * 200)
    config.privacy.method, config.model.kind = "none", "vanilla"
    config.training.epochs, config.optimizer.learning_rate = 30, 0.01
    result = run(config)
    assert result.accuracy > 0.7 and result.statement.startswith("No privacy")


@pytest.mark.slow
def test_the_command_prints_the_loss_and_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. " * 40)
    command = [sys.executable, "-m", "pipelines.shakespeare"]
    command += ["--config=configs/shakespeare_small.py", f"--config.data.path={path}"]
    sizes = {"data.length": 7, "model.width": 6, "model.blocks": 1, "training.epochs": 1}
    sizes |= {"training.batch_size": 16}
    options = [f"--config.{name}={value}" for name, value in sizes.items()]
    options.append(f"--config.report.directory={tmp_path}")
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout and "An example is a window" in done.stdout
    command[-1] = "--config.data.path=no"
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.strip().endswith(
        "pass --config.data.path=FILE."
    )
