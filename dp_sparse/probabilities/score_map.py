"""The map from a model's score to a calibrated one, fitted to a noisy histogram: post-processing.

Platt scaling is an affine map of the log odds, the maximum-likelihood one of the counts; isotonic
scaling is the increasing step function nearest to the rates of the bins, joined by lines. Of a
regression both are of the predictions themselves, by least squares.

Noise alone fills empty bins, so bins whose sum is within four deviations of nothing count as empty,
and cells below 0 as 0.
"""

import dataclasses
import warnings

import numpy as np
import scipy.optimize
import scipy.special

from dp_sparse.probabilities.predictions import log_odds
from dp_sparse.probabilities.score_histogram import ScoreHistogram

METHODS = ("platt", "isotonic")
_DEVIATIONS = 4.0
_FLAT = 1e-3  # the least slope of an affine map


@dataclasses.dataclass(frozen=True)
class ScoreMap:
    """A map of scores that never decreases, linear between its knots and flat outside of several.

    Attributes:
        knots: Scores, increasing, `[m]`; of an affine map one, at which it has `values[0]`.
        values: Calibrated scores at the knots, `[m]`.
        slope: Of an affine map; 0 otherwise.
    """

    knots: tuple[float, ...]
    values: tuple[float, ...]
    slope: float = 0.0

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Calibrated scores."""
        if len(self.knots) == 1:
            return self.values[0] + self.slope * (scores - self.knots[0])
        return np.interp(scores, self.knots, self.values)


IDENTITY = ScoreMap((0.0,), (0.0,), 1.0)


def usable(histogram: ScoreHistogram) -> np.ndarray:
    """Negatives and positives of each bin without what noise alone makes, float64 `[34, 2]`."""
    cells = histogram.cells
    deviation = histogram.noise_multiplier * np.sqrt(2)  # of the sum of two cells
    full = cells.sum(axis=1, keepdims=True) > _DEVIATIONS * deviation
    return np.maximum(cells, 0.0) * full


def fitted(histogram: ScoreHistogram, method: str) -> ScoreMap:
    """The map of a histogram.

    Warns:
        UserWarning: Too few bins stand out from the noise, so scores stay as they are.
    """
    cells = usable(histogram)
    if np.count_nonzero(cells.sum(axis=1)) < 2 or np.any(cells.sum(axis=0) == 0):
        warnings.warn(
            "Too few examples to calibrate beside noise of "
            f"{histogram.noise_multiplier:.3g} on each count: predictions stay as they are. Give "
            "more examples, or a larger share of epsilon.",
            stacklevel=4,
        )
        return IDENTITY
    regression = histogram.kind.name == "regression"
    fit = {"platt": _affine, "isotonic": _isotonic}[method]
    return fit(histogram.kind.middles, cells, regression)


def _affine(middles: np.ndarray, cells: np.ndarray, regression: bool) -> ScoreMap:
    total = cells.sum(axis=1)
    if regression:
        rates = np.divide(cells[:, 1], total, out=np.zeros_like(total), where=total > 0)
        inner = slice(1, -1) if np.count_nonzero(total[1:-1]) > 1 else slice(None)
        # What lies outside of the range of labels has no middle.
        slope, constant = _least_squares(middles[inner], rates[inner], total[inner])
        return ScoreMap((0.0,), (constant,), slope)

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        scores = given[0] * middles + given[1]
        negatives, positives = cells.T
        value = positives @ np.logaddexp(0, -scores) + negatives @ np.logaddexp(0, scores)
        error = total * scipy.special.expit(scores) - positives
        return value / total.sum(), np.array([error @ middles, error.sum()]) / total.sum()

    found = scipy.optimize.minimize(
        loss, np.array([1.0, 0.0]), jac=True, method="L-BFGS-B", bounds=[(_FLAT, None), (None,) * 2]
    )
    return ScoreMap((0.0,), (float(found.x[1]),), float(found.x[0]))


def _least_squares(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Slope and constant."""
    share = weights / weights.sum()
    x_mean, y_mean = share @ x, share @ y
    spread = share @ np.square(x - x_mean)
    slope = max(float(share @ ((x - x_mean) * (y - y_mean)) / spread), _FLAT)
    return slope, float(y_mean - slope * x_mean)


def _isotonic(middles: np.ndarray, cells: np.ndarray, regression: bool) -> ScoreMap:
    total = cells.sum(axis=1)
    full = total > 0
    # Half an example on either side, so that no rate is 0 or 1.
    rates = (cells[full, 1] + 0.5) / (total[full] + 1.0)
    found = scipy.optimize.isotonic_regression(rates, weights=total[full]).x
    values = found if regression else log_odds(found)
    return ScoreMap(tuple(map(float, middles[full])), tuple(map(float, values)))
