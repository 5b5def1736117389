"""A histogram of scores and what follows from it, plain: one example after the other."""

import math
from collections.abc import Iterable

import numpy as np

Example = tuple[float, float, float]  # score, label, weight


def counts(examples: Iterable[Example], edges: np.ndarray, cap: float) -> np.ndarray:
    """Negatives and positives by bin, `[len(edges) + 1, 2]`, in whole multiples of 1/1024."""
    found = np.zeros((len(edges) + 1, 2))
    for score, label, weight in examples:
        if math.isnan(score):
            continue
        place = sum(score >= edge for edge in edges)
        share = min(weight, cap) / cap
        for column, part in enumerate((1 - label, label)):
            found[place, column] += math.floor(1024 * share * part) / 1024
    return found


def auc(cells: np.ndarray) -> float:
    """Over all pairs of a negative and a positive, as whole examples."""
    won = pairs = 0.0
    for i, negatives in enumerate(cells[:, 0]):
        for j, positives in enumerate(cells[:, 1]):
            pairs += negatives * positives
            won += negatives * positives * (1.0 if j > i else 0.5 if j == i else 0.0)
    return won / pairs


def log_loss(cells: np.ndarray, scores: np.ndarray) -> float:
    """The mean over examples, each with the log odds of its bin."""
    total = 0.0
    for (negatives, positives), score in zip(cells, scores, strict=True):
        total += negatives * math.log1p(math.exp(score)) + positives * math.log1p(math.exp(-score))
    return total / float(cells.sum())


def calibration_error(cells: np.ndarray, predicted: np.ndarray) -> float:
    """The mean over examples of |rate − prediction| of their bin."""
    total = 0.0
    for (negatives, positives), p in zip(cells, predicted, strict=True):
        if negatives + positives:
            total += (negatives + positives) * abs(positives / (negatives + positives) - p)
    return total / float(cells.sum())
