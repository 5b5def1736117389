"""Variances through layers, in float64: sums written out, integrals by quadrature."""

from collections.abc import Callable

import numpy as np
from scipy import special, stats

_GRID = np.linspace(-12.0, 12.0, 20_001)  # deviations


def linear(
    mean: np.ndarray,
    variance: np.ndarray,
    kernel: np.ndarray,
    weight_variance: float,
    bias: bool = True,
) -> np.ndarray:
    """Var[Σ_i x_i·W_ij + b_j] of independent x, W and b, if there is one; `[in]` to `[out]`."""
    found = np.full(kernel.shape[1], weight_variance if bias else 0.0)
    for j in range(kernel.shape[1]):
        for i in range(kernel.shape[0]):
            second = (mean[i] ** 2 + variance[i]) * (kernel[i, j] ** 2 + weight_variance)
            found[j] += second - mean[i] ** 2 * kernel[i, j] ** 2
    return found


def relu(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0.0)


def gelu(values: np.ndarray) -> np.ndarray:
    return values * special.ndtr(values)


def of_activation(
    function: Callable[[np.ndarray], np.ndarray], mean: float, variance: float
) -> float:
    """Var[f(X)] of X ~ N(mean, variance), by the trapezoidal rule."""
    values = function(mean + np.sqrt(variance) * _GRID)
    density = stats.norm.pdf(_GRID)
    first = np.trapezoid(values * density, _GRID)
    return float(np.trapezoid((values - first) ** 2 * density, _GRID))


def layer_norm(
    mean: np.ndarray,
    variance: np.ndarray,
    scale: np.ndarray,
    weight_variance: float,
    epsilon: float,
) -> np.ndarray:
    """To first order, by the matrix of derivatives; `[d]`."""
    width = len(mean)
    deviation = np.sqrt(mean.var() + variance.mean() + epsilon)
    y = (mean - mean.mean()) / deviation
    jacobian = (np.eye(width) - 1 / width - np.outer(y, y) / width) / deviation
    normalised = jacobian**2 @ variance
    return scale**2 * normalised + weight_variance * (normalised + y**2 + 1)


def attention(
    query: np.ndarray,
    key: np.ndarray,
    key_variance: np.ndarray,
    allowed: np.ndarray,
    after_softmax: bool,
) -> np.ndarray:
    """Scores of one head, `[queries, keys]`, of vectors `[positions, width]`."""
    width = query.shape[1]
    scores = np.zeros(allowed.shape)
    for t in range(len(query)):
        logits, excess = np.full(len(key), -np.inf), np.zeros(len(key))
        for s in np.flatnonzero(allowed[t]):
            logits[s] = query[t] @ key[s] / np.sqrt(width)
            excess[s] = (query[t] ** 2) @ key_variance[s] / (2 * width)
        weights = special.softmax(logits if after_softmax else logits - excess)
        scores[t] = weights * np.exp(-excess) if after_softmax else weights
    return scores
