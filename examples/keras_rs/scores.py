"""What judges: errors in stars, and how often the right film is among the first."""

from typing import Any

import keras
import numpy as np


def in_stars(predicted: Any, rating: np.ndarray) -> float:
    """The root of the mean squared error of labels (stars − 1) / 4, in stars."""
    errors = np.reshape(predicted, [-1]) - (rating - 1) / 4
    return float(4 * np.sqrt(np.mean(np.square(errors))))


def recall(found: Any, films: np.ndarray) -> float:
    """The share of rows `[rows, k]` that have the film, in percent."""
    return float(100 * np.mean(np.any(np.asarray(found) == films[:, None], axis=1)))


def predictions(model: keras.Model, x: Any, name: str) -> np.ndarray:
    """An output of the model."""
    return np.asarray(model.predict(x, batch_size=4096, verbose=0)[name])
