"""Figures 2, 3 and 4 of "Shuffled DP-SGD" as numbers, and what DP-SGD guarantees beside them."""

import dataclasses
import math
from typing import Any

import numpy as np
from scipy import optimize, stats

import dp_sparse
from dp_sparse.auditing import GaussianTradeOff

_HALF_SST2 = 1 / (2 * 67_349)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of Figure 3.

    Attributes:
        model: Its name there.
        dimension: Trained weights.
        delta: As the paper sets it.
        squared_ratio: (c′/c)², the round number that gives the printed σ.
        printed: σ by ε, where the paper prints it.
    """

    model: str
    dimension: float
    delta: float
    squared_ratio: int
    printed: dict[float, float]


PANELS = (
    Panel("ViT", 85.8e6, 5e-6, 250, {0.25: 0.935, 0.5: 0.929, 1: 0.917, 4: 0.862}),
    Panel("GPT-2", 124e6, 8e-6, 250, {0.25: 0.926, 0.5: 0.920, 1: 0.908, 4: 0.855}),
    Panel("GPT-2-large, E2E", 838e6, 8e-6, 250, {}),
    Panel("RoBERTa", 125e6, _HALF_SST2, 125, {0.25: 0.782, 0.5: 0.777, 1: 0.769, 4: 0.729}),
    Panel("BERT", 110e6, _HALF_SST2, 125, {0.25: 0.785, 0.5: 0.780, 1: 0.771, 4: 0.731}),
    Panel("GPT-2-large, DART", 838e6, 1e-5, 250, {}),
)
EPSILONS = (0.25, 0.5, 1, 2, 4)
DIMENSIONS = (1e2, 1e4, 1e6, 1e8, 1e9)
HEAT = Panel("", 0, 1e-5, 250, {})
QUANTILES = (0.05, 0.5, 0.95)


def claimed_sigma(epsilon: float, panel: Panel, dimension: float | None = None) -> float:
    """σ by Theorem 6 for one step."""
    ratio = math.sqrt(panel.squared_ratio)
    return dp_sparse.theorem6_sigma_not_a_guarantee(
        epsilon, panel.delta, dimension or panel.dimension, clip=1.0, batch_clip=ratio
    )


def dp_sgd_sigma(epsilon: float, delta: float) -> float:
    """σ of one step of DP-SGD."""
    return float(
        optimize.brentq(lambda s: GaussianTradeOff(s, delta).epsilon(1.0) - epsilon, 0.1, 200.0)
    )


def true_delta(epsilon: float, sigma: float) -> float:
    """δ of the Gaussian mechanism at ε."""
    first = stats.norm.cdf(1 / (2 * sigma) - epsilon * sigma)
    return float(first - math.exp(epsilon) * stats.norm.cdf(-1 / (2 * sigma) - epsilon * sigma))


def figure_3() -> list[dict[str, Any]]:
    """For each panel and ε: σ of both, and what the smaller one guarantees."""
    rows = []
    for panel in PANELS:
        for epsilon in EPSILONS:
            sigma = claimed_sigma(epsilon, panel)
            rows.append(
                {
                    "model": panel.model,
                    "epsilon": epsilon,
                    "sigma": sigma,
                    "printed": panel.printed.get(epsilon),
                    "dp_sgd_sigma": dp_sgd_sigma(epsilon, panel.delta),
                    "guaranteed_epsilon": GaussianTradeOff(sigma, panel.delta).epsilon(1.0),
                    "delta": panel.delta,
                    "true_delta": true_delta(epsilon, sigma),
                }
            )
    return rows


def figure_4() -> list[dict[str, Any]]:
    """σ over ε and dimension; d = 1 is DP-SGD."""
    return [
        {
            "epsilon": epsilon,
            "sigma": [
                dp_sgd_sigma(epsilon, HEAT.delta),
                *(claimed_sigma(epsilon, HEAT, dimension) for dimension in DIMENSIONS),
            ],
        }
        for epsilon in EPSILONS
    ]


def figure_2(sigma: float, terms: int, draws: int = 1000) -> dict[str, Any]:
    """Quantiles of log Σ exp(Y), Y ~ N(0, 1/σ²) independent, by each approximation.

    Args:
        sigma: The noise multiplier, so that Y's deviation is 1/σ as in Theorem 6.
        terms: How many Y.
        draws: Of the whole sum, for Monte Carlo; a tenth of them for the methods that fit draws.
    """
    rng, deviation = np.random.default_rng(0), 1 / sigma
    logs = np.array([_log_sum(deviation * rng.normal(size=terms)) for _ in range(draws)])
    few = np.sort(logs[: draws // 10])
    places = stats.norm.ppf((np.arange(len(few)) + 0.5) / len(few))
    fit = stats.linregress(places, few)
    density = stats.gaussian_kde(few)
    normals = {
        "F-W": fenton_wilkinson(deviation, terms),
        "S-Y": schwartz_yeh(deviation, terms),
        "LSQ": (float(fit.intercept), float(fit.slope)),
    }
    found = {
        name: [mean + spread * stats.norm.ppf(q) for q in QUANTILES]
        for name, (mean, spread) in normals.items()
    }
    found["KDE"] = [_quantile(density, q, few) for q in QUANTILES]
    found = {"Monte Carlo": np.quantile(logs, QUANTILES).tolist(), **found}
    return {"sigma": sigma, "terms": terms, "quantiles": found, "normals": normals}


def _log_sum(values: np.ndarray) -> float:
    return float(np.logaddexp.reduce(values))


def _quantile(density: Any, level: float, drawn: np.ndarray) -> float:
    width = 5 * (drawn[-1] - drawn[0])
    below = lambda x: density.integrate_box_1d(-np.inf, x) - level  # noqa: E731
    return float(optimize.brentq(below, drawn[0] - width, drawn[-1] + width))


def fenton_wilkinson(deviation: float, terms: int) -> tuple[float, float]:
    """Mean and deviation of a normal whose exponential has the sum's mean and variance."""
    variance = np.logaddexp(0, deviation**2 + math.log(-math.expm1(-(deviation**2)) / terms))
    return float(math.log(terms) + deviation**2 / 2 - variance / 2), math.sqrt(variance)


def schwartz_yeh(deviation: float, terms: int) -> tuple[float, float]:
    """Mean and deviation of the log sum, one term after the other, each time taken as normal."""
    points, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = np.outer(weights, weights) / weights.sum() ** 2
    mean, spread = 0.0, deviation
    for _ in range(terms - 1):
        logs = np.logaddexp(mean + spread * points[:, None], deviation * points)
        mean = float((weights * logs).sum())
        spread = math.sqrt(float((weights * (logs - mean) ** 2).sum()))
    return mean, spread
