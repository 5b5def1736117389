"""One noise-free step of DP-AdaFEST (Algorithm 1, corrected) and of DP-SGD in NumPy.

Written from the page, line by line, on brute-force gradients: it builds the map over all c rows and
loops over the examples.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tests.reference.clipping import clipped_sum

Gradients = Sequence[Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class AdaFEST:
    """The numbers of Algorithm 1."""

    clip_norm: float
    contribution_clip_norm: float
    threshold: float
    expected_batch_size: float


def adafest_mean_gradient(
    settings: AdaFEST,
    gradients: Gradients,
    lookups: Sequence[Sequence[Sequence[int]]],
    table_of: Sequence[int],
    present: Sequence[float],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Line by line without noise.

    Args:
        settings: C2, C1, τ, B.
        gradients: For each example, one array for each variable.
        lookups: For each example and table, the rows it looks up (with repetitions).
        table_of: For each table, the number of its variable.
        present: 0 for padding.

    Returns:
        The mean gradient of each variable, and the survivors (bool `[rows]`) of each table.
    """
    sizes = [len(gradients[0][variable]) for variable in table_of]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    noisy_map = np.zeros(starts[-1])
    for example, real in zip(lookups, present, strict=True):
        presence = np.zeros(starts[-1])
        for start, rows in zip(starts, example, strict=False):
            presence[start + np.asarray(rows, int)] = 1.0
        norm = np.sqrt(presence.sum())
        if real > 0 and norm > 0:
            noisy_map += presence * min(1.0, settings.contribution_clip_norm / norm)
    survivors = np.split(noisy_map >= settings.threshold, starts[1:-1])
    restricted = [[part.copy() for part in example] for example in gradients]
    for example in restricted:
        for variable, kept in zip(table_of, survivors, strict=True):
            example[variable][~kept] = 0.0
    total = clipped_sum(restricted, settings.clip_norm, present)
    return [part / settings.expected_batch_size for part in total], survivors


def dpsgd_mean_gradient(
    gradients: Gradients, clip_norm: float, expected_batch_size: float, present: Sequence[float]
) -> list[np.ndarray]:
    """Clip, sum, divide by the expected batch size."""
    return [part / expected_batch_size for part in clipped_sum(gradients, clip_norm, present)]


class SGD:
    """`w -= lr·g`."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def apply(self, weights: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        """Updates the weights in place."""
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= self.learning_rate * gradient


class Adagrad:
    """`a += g²; w -= lr·g/√(a + ε)`, a row without gradient staying as it is."""

    def __init__(self, learning_rate: float, start: float = 0.1, epsilon: float = 1e-7) -> None:
        self.learning_rate, self.start, self.epsilon = learning_rate, start, epsilon
        self.totals: list[np.ndarray] = []

    def apply(self, weights: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        """Updates the weights in place."""
        if not self.totals:
            self.totals = [np.full_like(weight, self.start) for weight in weights]
        for weight, total, gradient in zip(weights, self.totals, gradients, strict=True):
            total += gradient**2
            weight -= self.learning_rate * gradient / np.sqrt(total + self.epsilon)
