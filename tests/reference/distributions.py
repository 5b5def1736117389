"""Goodness of fit at one significance, so low that a right implementation never flakes."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

SIGNIFICANCE = 1e-6
_SMALLEST_BIN = 8.0  # expected draws in a bin of a χ² test


def chi_square(draws: Sequence[int] | np.ndarray, distribution: stats.rv_discrete) -> float:
    """p-value of integer draws under a frozen discrete distribution; small bins are pooled."""
    draws = np.asarray(draws)
    low, high = int(distribution.ppf(1e-12)), int(distribution.isf(1e-12))
    values = np.arange(max(low, 0), high + 1)
    expected = len(draws) * distribution.pmf(values)
    edges, total = [], 0.0
    for value, mass in zip(values, expected, strict=True):
        total += mass
        if total >= _SMALLEST_BIN:
            edges.append(value)  # a bin ends with this value
            total = 0.0
    edges = edges[:-1] if len(edges) > 1 else edges  # the last bin takes what remains
    observed = np.bincount(np.searchsorted(edges, draws), minlength=len(edges) + 1)
    bounds = np.concatenate([[0.0], distribution.cdf(edges), [1.0]])
    return float(stats.chisquare(observed, len(draws) * np.diff(bounds)).pvalue)


def binomial(successes: int, trials: int, probability: float) -> float:
    """Two-sided p-value of a number of successes."""
    return float(stats.binomtest(int(successes), int(trials), probability).pvalue)


def largest_correlation_z(indicators: np.ndarray) -> float:
    """The largest |correlation|·√n over pairs of columns of `[n, columns]`: normal, each."""
    correlation = np.corrcoef(indicators, rowvar=False)
    off_diagonal = correlation[~np.eye(len(correlation), dtype=bool)]
    return float(np.max(np.abs(off_diagonal)) * np.sqrt(len(indicators)))
