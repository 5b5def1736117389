"""Predictions as probabilities: a noisy histogram of scores, and what follows from it.

May use: all subpackages up to `reports`.
"""

from dp_sparse.probabilities.calibration import (
    Calibration,
    calibrate_probabilities,
    calibration_of,
    draw_histogram,
    require_asked,
    require_method,
    reserve_calibration,
    warn_if_trained_on,
)
from dp_sparse.probabilities.score_histogram import ScoreHistogram

__all__ = [
    "Calibration",
    "ScoreHistogram",
    "calibrate_probabilities",
    "calibration_of",
    "draw_histogram",
    "require_asked",
    "require_method",
    "reserve_calibration",
    "warn_if_trained_on",
]
