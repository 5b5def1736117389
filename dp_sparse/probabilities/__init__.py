"""Predictions as probabilities: a noisy histogram of scores, and what follows from it.

May use: all subpackages up to `step`.
"""

from dp_sparse.probabilities.calibration import (
    Calibration,
    calibrate_probabilities,
    calibration_of,
    draw_histogram,
    reserve_calibration,
)
from dp_sparse.probabilities.score_histogram import ScoreHistogram

__all__ = [
    "Calibration",
    "ScoreHistogram",
    "calibrate_probabilities",
    "calibration_of",
    "draw_histogram",
    "reserve_calibration",
]
