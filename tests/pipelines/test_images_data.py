"""What the image pipeline reads, and what it refuses and how."""

import sys
from pathlib import Path
from types import SimpleNamespace

import ml_collections
import numpy as np
import pytest

from configs.mnist_mlp import get_config
from pipelines.images.data import ImageDataError, LabelledImages, hold_out, load


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """Twelve training and six test images of 4×5 uint8 pixels, or what `changes` puts there."""
    rng = np.random.default_rng(0)
    whole = {
        "x_train": rng.integers(0, 256, (12, 4, 5)).astype(np.uint8),
        "y_train": np.arange(12) % 10,
        "x_test": rng.integers(0, 256, (6, 4, 5)).astype(np.uint8),
        "y_test": np.arange(6),
    }
    return {**whole, **changes}


def data_config(path: Path | str = "", tfds: str = "") -> ml_collections.ConfigDict:
    config = get_config().data
    config.path, config.tfds = str(path), tfds
    return config


def saved(folder: Path, **changes: np.ndarray) -> ml_collections.ConfigDict:
    np.savez(folder / "images.npz", **arrays(**changes))
    return data_config(folder / "images.npz")


def test_bytes_become_shares(tmp_path: Path) -> None:
    training, test = load(saved(tmp_path))
    assert (len(training), len(test)) == (12, 6)
    assert training.images.dtype == np.float32 and training.labels.dtype == np.int32
    np.testing.assert_allclose(training.images, arrays()["x_train"] / 255, rtol=1e-6)
    np.testing.assert_array_equal(test.labels, np.arange(6))


def test_floats_between_0_and_1_stay(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).random((12, 4, 5))
    training, _ = load(saved(tmp_path, x_train=pixels))
    np.testing.assert_array_equal(training.images, pixels.astype(np.float32))


NOT_A_NUMBER = np.full((12, 4, 5), np.nan)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x_train": np.full((12, 4, 5), 1.5)}, "between 0 and 1, got 1.5 to 1.5 in x_train"),
        ({"x_train": np.full((12, 4, 5), -0.1)}, "between 0 and 1, got -0.1 to -0.1"),
        ({"x_train": NOT_A_NUMBER}, "between 0 and 1, got nan to nan in x_train"),
        ({"x_test": np.zeros((6, 4, 5), np.int64)}, "uint8 or floating-point pixels, got int64"),
        ({"x_train": np.zeros((12, 20), np.uint8)}, r"Expected x_train of shape .* got \(12, 20\)"),
        ({"x_train": np.zeros((0, 4, 5)), "y_train": np.zeros(0)}, r"none of them 0, got \(0, 4"),
        ({"x_test": np.zeros((6, 4, 6), np.uint8)}, r"one shape, got \(4, 5\) .* \(4, 6\)"),
        ({"y_train": np.arange(11)}, r"y_train of shape \(12,\), .* got \(11,\)"),
        ({"y_train": np.zeros((12, 10), int)}, r"y_train of shape \(12,\), .* got \(12, 10\)"),
        ({"y_train": np.zeros(12)}, "integer labels in y_train, got float64"),
        ({"y_test": np.arange(6) + 5}, r"from 0 to 9 \(data.num_classes=10\), got 5 to 10 in y_t"),
        ({"y_test": np.arange(6) - 1}, "from 0 to 9 .* got -1 to 4 in y_test"),
    ],
)
def test_wrong_arrays_are_named(
    tmp_path: Path, changes: dict[str, np.ndarray], sentence: str
) -> None:
    with pytest.raises(ImageDataError, match=sentence):
        load(saved(tmp_path, **changes))


def test_wrong_names_are_listed(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=np.zeros(3), y_train=np.zeros(3))
    with pytest.raises(ImageDataError, match=r"x_test, y_test in .* got \['images', 'y_train'\]"):
        load(data_config(tmp_path / "images.npz"))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ImageDataError, match="No such file: nowhere.npz."):
        load(data_config("nowhere.npz"))


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "images.npz").write_bytes(content)
    with pytest.raises(ImageDataError, match="Expected an .npz file of plain arrays"):
        load(data_config(tmp_path / "images.npz"))


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros(3))
    with pytest.raises(ImageDataError, match="Expected an .npz file of plain arrays"):
        load(data_config(tmp_path / "images.npy"))


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    config = saved(tmp_path, x_train=np.array([{}, {}], object))
    with pytest.raises(ImageDataError, match="Expected an .npz file of plain arrays"):
        load(config)


@pytest.mark.parametrize(("path", "tfds"), [("", ""), ("images.npz", "mnist")])
def test_one_source_and_no_more(path: str, tfds: str) -> None:
    with pytest.raises(ImageDataError, match="Expected either data.path or data.tfds"):
        load(data_config(path, tfds))


def test_without_tensorflow_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[data\]' in the clone"):
        load(data_config(tfds="mnist"))


def test_tensorflow_datasets_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = arrays(), []

    def load_split(name: str, split: str, **options: object) -> tuple[np.ndarray, np.ndarray]:
        calls.append((name, options))
        return whole[f"x_{split}"], whole[f"y_{split}"]

    module = SimpleNamespace(load=load_split, as_numpy=lambda split: split)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    training, test = load(data_config(tfds="mnist"))
    assert (len(training), len(test)) == (12, 6)
    options = {"batch_size": -1, "as_supervised": True, "data_dir": None}
    assert calls == [("mnist", options)] * 2


def test_the_last_images_are_held_out() -> None:
    images = np.arange(12, dtype=np.float32).reshape(12, 1, 1)
    training, validation = hold_out(LabelledImages(images, np.arange(12)), 0.25)
    assert training.labels.tolist() == list(range(9))
    assert validation.labels.tolist() == [9, 10, 11]
    assert validation.images[:, 0, 0].tolist() == [9, 10, 11]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0, 0.01, 0.99, float("nan")])
def test_fractions_that_leave_nothing_are_refused(fraction: float) -> None:
    whole = LabelledImages(np.zeros((12, 1, 1), np.float32), np.zeros(12, np.int32))
    with pytest.raises(ImageDataError, match="data.validation_fraction between 0 and 1"):
        hold_out(whole, fraction)
