"""The whole job on real digits: a short run, its refusals, and the accuracy of the full one."""

import os
import subprocess
import sys
from pathlib import Path

import ml_collections
import numpy as np
import pytest

from configs.mnist_mlp import get_config
from pipelines.images.data import LabelledImages
from pipelines.images.train import MODELS, accuracy, train

ROOT = Path(__file__).parents[2]
WITH_DATA = pytest.mark.skipif(
    "DP_SPARSE_DATA" not in os.environ, reason="DP_SPARSE_DATA is not set"
)


def small_config(folder: Path) -> ml_collections.ConfigDict:
    config = get_config()
    config.training.batch_size, config.training.steps = 32, 2
    config.report.directory, config.report.verbose = str(folder), 0
    return config


def made_up(examples: int) -> LabelledImages:
    rng = np.random.default_rng(examples)
    labels = rng.integers(0, 10, examples).astype(np.int32)
    return LabelledImages(rng.random((examples, 12, 12), np.float32), labels)


def test_accuracy_is_the_share_of_right_answers() -> None:
    class Constant:
        def predict(self, images: np.ndarray, **options: object) -> np.ndarray:
            return np.tile([0.0, 2.0, 1.0], (len(images), 1))

    labels = np.array([1, 1, 0, 2, 1])
    assert accuracy(Constant(), LabelledImages(np.zeros((5, 1, 1)), labels)) == 3 / 5


@pytest.mark.slow
def test_the_test_split_is_left_alone_while_choosing(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.data.validation_fraction = 0.25
    nothing = LabelledImages(np.zeros((0, 12, 12)), np.zeros(0))
    result = train(config, made_up(200), nothing)
    assert result.evaluated_on == "validation" and 0 <= result.accuracy <= 1
    assert "each of 150 examples" in result.statement
    assert (result.steps, result.delta) == (2, 1e-5) and 0 < result.epsilon <= 3
    assert "epsilon" in (tmp_path / "report.html").read_text()


def test_bad_configurations_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.name = "perceptron"
    with pytest.raises(ValueError, match=r"one of .*'mlp'.*got model.name='perceptron'"):
        train(config, made_up(100), made_up(10))
    config.model.name = "cnn"
    with config.unlocked():
        config.model.options = {"hidden": (8,), "strides": 2}
    with pytest.raises(ValueError, match="model.options: .*strides"):
        train(config, made_up(100), made_up(10))
    config = small_config(tmp_path)
    config.training.batch_size = 101
    with pytest.raises(ValueError, match="expected_batch_size=101"):
        train(config, made_up(100), made_up(10))


def test_every_model_is_an_image_classifier() -> None:
    for name, model in MODELS.items():
        options = {} if name in ("mlp", "cnn", "rnn", "lstm") else {"width": 4, "groups": 2}
        assert model((32, 32, 3), 10, **options).output_shape == (None, 10)


def run_pipeline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines.images", "--config", "configs/mnist_mlp.py"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_an_unknown_key_is_an_error() -> None:
    finished = run_pipeline("--config.training.epochs=3")
    assert finished.returncode != 0 and "epochs" in finished.stderr


@pytest.mark.slow
def test_a_file_that_is_not_there_is_named() -> None:
    finished = run_pipeline("--config.data.path=nowhere.npz")
    assert finished.returncode == 1
    assert finished.stderr.strip().splitlines()[-1] == "error: No such file: nowhere.npz."


def accuracy_printed(finished: subprocess.CompletedProcess[str]) -> float:
    assert finished.returncode == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("test accuracy"))
    assert "delta 1e-05" in line
    assert float(line.split("epsilon ")[1].split(",")[0]) <= 3.0
    assert "differential privacy protects one example after" in finished.stdout
    return float(line.split(",")[0].removeprefix("test accuracy"))


def mnist() -> Path:
    return Path(os.environ["DP_SPARSE_DATA"]) / "mnist" / "mnist.npz"


@pytest.mark.slow
@WITH_DATA
def test_real_digits(tmp_path: Path) -> None:
    """A few steps on some of the digits are far better than chance."""
    with np.load(mnist()) as whole:
        part = {name: whole[name][:6000] for name in whole.files}
    np.savez(tmp_path / "digits.npz", **part)
    finished = run_pipeline(
        f"--config.data.path={tmp_path / 'digits.npz'}",
        f"--config.report.directory={tmp_path / 'run'}",
        "--config.training.batch_size=600",
        "--config.training.steps=60",
        "--config.report.verbose=2",
    )
    assert accuracy_printed(finished) > 0.5
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@WITH_DATA
def test_all_digits(tmp_path: Path) -> None:
    """The config as it stands: more than 95 % at ε = 3 and δ = 1e-5."""
    finished = run_pipeline(
        f"--config.data.path={mnist()}",
        f"--config.report.directory={tmp_path}",
        "--config.report.verbose=2",
    )
    assert accuracy_printed(finished) > 0.95
