"""What a noisy histogram of scores says of a model: measures of its own data that ε covers.

All of it is post-processing. Scores count as the middle of their bin. The standard error of a
measure is that of the noise: the deviation over 200 draws of the same noise on the counts that
stand out from it.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import scipy.special

from dp_sparse.probabilities.predictions import log_odds
from dp_sparse.probabilities.score_histogram import UNITS, ScoreHistogram
from dp_sparse.probabilities.score_map import IDENTITY, ScoreMap, usable

_DRAWS, _SEED = 200, 1


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number from a noisy histogram.

    Attributes:
        value: The number.
        standard_error: The deviation that noise gives it.
    """

    value: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.4f}"


def measured(histogram: ScoreHistogram, score_map: ScoreMap) -> dict[str, Measure]:
    """The measures by name, before and after calibration."""
    values = _measures(histogram, score_map)
    rng = np.random.default_rng(_SEED)
    deviation, counts = histogram.noise_multiplier * UNITS, UNITS * usable(histogram)
    drawn: dict[str, list[float]] = {name: [] for name in values}
    for _ in range(_DRAWS):
        noisy = np.rint(rng.normal(counts, deviation)).astype(np.int64)
        again = dataclasses.replace(histogram, counts=noisy)
        found = _measures(again, score_map)
        for name, values_of in drawn.items():
            values_of.append(found.get(name, math.nan))
    return {name: Measure(value, float(np.nanstd(drawn[name]))) for name, value in values.items()}


def rates(histogram: ScoreHistogram, score_map: ScoreMap) -> tuple[np.ndarray, ...]:
    """For each bin that is not empty: the prediction, the rate, its standard error, its share."""
    cells = usable(histogram)
    total = cells.sum(axis=1)
    full = total > 0
    seen = cells[full, 1] / total[full]
    noise = histogram.noise_multiplier * np.sqrt(np.square(seen) + np.square(1 - seen))
    predicted = _predicted(histogram, score_map)[full]
    return predicted, seen, noise / total[full], total[full] / total.sum()


def _predicted(histogram: ScoreHistogram, score_map: ScoreMap) -> np.ndarray:
    scores = score_map(histogram.kind.middles)
    return scores if histogram.kind.name == "regression" else scipy.special.expit(scores)


def _measures(histogram: ScoreHistogram, score_map: ScoreMap) -> dict[str, float]:
    cells = usable(histogram)
    if not cells.sum():
        return {}
    before, after = (_predicted(histogram, each) for each in (IDENTITY, score_map))
    found = {
        "rate": float(cells[:, 1].sum() / cells.sum()),
        "mean_prediction": _mean(cells, before),
        "calibrated_mean_prediction": _mean(cells, after),
        "calibration_error": _calibration_error(cells, before),
        "calibrated_calibration_error": _calibration_error(cells, after),
    }
    if histogram.kind.name != "regression":
        middles = histogram.kind.middles
        losses = _log_loss(cells, middles), _log_loss(cells, score_map(middles))
        constant = _log_loss(cells, log_odds(np.full(len(cells), found["rate"])))
        found |= {"auc": _auc(cells), "log_loss": losses[0], "calibrated_log_loss": losses[1]}
        found |= {"log_loss_of_a_constant": constant}
    return found


def _mean(cells: np.ndarray, predicted: np.ndarray) -> float:
    return float(cells.sum(axis=1) @ predicted / cells.sum())


def _calibration_error(cells: np.ndarray, predicted: np.ndarray) -> float:
    """The mean over examples of |rate − prediction| of their bin."""
    return float(np.abs(cells[:, 1] - cells.sum(axis=1) * predicted).sum() / cells.sum())


def _log_loss(cells: np.ndarray, scores: np.ndarray) -> float:
    """The mean over examples, each with the log odds of its bin."""
    losses = cells[:, 0] @ np.logaddexp(0, scores) + cells[:, 1] @ np.logaddexp(0, -scores)
    return float(losses / cells.sum())


def _auc(cells: np.ndarray) -> float:
    """How often a positive has the higher score; half of those in one bin count."""
    negatives, positives = cells.T
    below = np.concatenate([[0.0], np.cumsum(negatives)[:-1]])
    pairs = negatives.sum() * positives.sum()
    return float(positives @ (below + negatives / 2) / pairs) if pairs else float("nan")


def as_table(measures: Mapping[str, Measure]) -> list[tuple[str, str, str]]:
    """Rows of what was measured, before and after calibration."""
    rows = []
    for name, measure in measures.items():
        after = measures.get(f"calibrated_{name}")
        if not name.startswith("calibrated_"):
            rows.append((name.replace("_", " "), str(measure), "" if after is None else str(after)))
    return rows
