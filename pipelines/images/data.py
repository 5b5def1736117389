"""Labelled images from an .npz file or from tensorflow-datasets, checked and scaled to [0, 1].

Nothing is fitted to the images: uint8 pixels are divided by 255, and floating-point pixels must lie
between 0 and 1 already. The number of classes is the config's, since labels are private.
"""

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class ImageDataError(ValueError):
    """The images or their labels are missing, or in a form that the pipeline does not read."""


@dataclasses.dataclass(frozen=True)
class LabelledImages:
    """One split.

    Attributes:
        images: float32 `[examples, height, width]` or `[examples, height, width, channels]`,
            between 0 and 1.
        labels: int32 `[examples]`, from 0 to the number of classes less one.
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load(config: ml_collections.ConfigDict) -> tuple[LabelledImages, LabelledImages]:
    """The training and the test split of `config.data`.

    Raises:
        ImageDataError: Neither or both of `path` and `tfds` are given, or what they name is not a
            labelled image data set of `num_classes` classes.
        ImportError: `tfds` is given and tensorflow-datasets is not installed.
    """
    if bool(config.path) == bool(config.tfds):
        raise ImageDataError(
            f"Expected either data.path or data.tfds, got data.path={config.path!r} and "
            f"data.tfds={config.tfds!r}: pass --config.data.path=FILE.npz."
        )
    arrays = _from_tfds(config) if config.tfds else _from_npz(Path(config.path))
    splits = [
        _checked(arrays[f"x_{split}"], arrays[f"y_{split}"], config.num_classes, split)
        for split in ("train", "test")
    ]
    shapes = [split.images.shape[1:] for split in splits]
    if shapes[0] != shapes[1]:
        raise ImageDataError(
            f"Expected images of one shape, got {shapes[0]} in x_train and {shapes[1]} in x_test."
        )
    return splits[0], splits[1]


def hold_out(training: LabelledImages, fraction: float) -> tuple[LabelledImages, LabelledImages]:
    """The training split without its last `fraction`, and that fraction.

    Raises:
        ImageDataError: `fraction` is not between 0 and 1, or leaves a part empty.
    """
    boundary = round(len(training) * (1 - fraction)) if 0 < fraction < 1 else 0
    if not 0 < boundary < len(training):
        raise ImageDataError(
            f"Expected data.validation_fraction between 0 and 1 that leaves images in both parts, "
            f"got {fraction} of {len(training)} images."
        )
    return (
        LabelledImages(training.images[:boundary], training.labels[:boundary]),
        LabelledImages(training.images[boundary:], training.labels[boundary:]),
    )


def _from_npz(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ImageDataError(f"No such file: {path}.")
    try:
        with np.load(path) as archive:  # refuses pickled objects
            names = sorted(archive.files)
            arrays = {name: archive[name] for name in _ARRAYS if name in names}
    except (OSError, EOFError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ImageDataError(
            f"Expected an .npz file of plain arrays, got {path}, which cannot be read as one "
            f"({error})."
        ) from error
    if len(arrays) < len(_ARRAYS):
        raise ImageDataError(f"Expected arrays {', '.join(_ARRAYS)} in {path}, got {names}.")
    return arrays


def _from_tfds(config: ml_collections.ConfigDict) -> dict[str, np.ndarray]:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            "data.tfds needs tensorflow-datasets: pip install '.[data]' in the clone."
        ) from error
    arrays: dict[str, Any] = {}
    for split in ("train", "test"):
        arrays[f"x_{split}"], arrays[f"y_{split}"] = tfds.as_numpy(
            tfds.load(
                config.tfds,
                split=split,
                batch_size=-1,  # the whole split as one pair of arrays
                as_supervised=True,
                data_dir=config.directory or None,
            )
        )
    return arrays


def _checked(
    images: np.ndarray, labels: np.ndarray, num_classes: int, split: str
) -> LabelledImages:
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise ImageDataError(
            f"Expected x_{split} of shape [examples, height, width] or [examples, height, width, "
            f"channels] with none of them 0, got {images.shape}."
        )
    if labels.shape != images.shape[:1]:
        raise ImageDataError(
            f"Expected y_{split} of shape {images.shape[:1]}, one label for each image of "
            f"x_{split}, got {labels.shape}."
        )
    return LabelledImages(_scaled(images, split), _class_ids(labels, num_classes, split))


def _scaled(images: np.ndarray, split: str) -> np.ndarray:
    if images.dtype == np.uint8:
        return images.astype(np.float32) / 255
    if not np.issubdtype(images.dtype, np.floating):
        raise ImageDataError(
            f"Expected x_{split} of uint8 or floating-point pixels, got {images.dtype}."
        )
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 1):  # so that NaN is refused too
        raise ImageDataError(
            f"Expected floating-point pixels between 0 and 1, got {low:g} to {high:g} in "
            f"x_{split}: divide them by a constant, or keep them as uint8."
        )
    return images.astype(np.float32)


def _class_ids(labels: np.ndarray, num_classes: int, split: str) -> np.ndarray:
    if not np.issubdtype(labels.dtype, np.integer):
        raise ImageDataError(f"Expected integer labels in y_{split}, got {labels.dtype}.")
    low, high = labels.min(), labels.max()
    if low < 0 or high >= num_classes:
        raise ImageDataError(
            f"Expected labels from 0 to {num_classes - 1} (data.num_classes={num_classes}), got "
            f"{low} to {high} in y_{split}."
        )
    return labels.astype(np.int32)
