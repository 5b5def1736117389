"""Lower bounds on ε as the papers write them, slow and plain."""

import math
from collections.abc import Callable

from scipy import stats


def upper_end(successes: int, trials: int, side: float) -> float:
    """The p at which so few successes have probability `side`: Clopper and Pearson (1934)."""
    return root(lambda p: stats.binom.cdf(successes, trials, p) - side, 0.0, 1.0)


def lower_end(successes: int, trials: int, side: float) -> float:
    return 1 - upper_end(trials - successes, trials, side)


def root(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, positive at first, becomes 0 or less; by halving."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return high


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Steinke, Nasr and Jagielski (2023), Theorem 5.2, term by term."""
    rate = math.exp(epsilon) / (1 + math.exp(epsilon))
    probabilities = [float(stats.binom.pmf(v, guesses, rate)) for v in range(guesses + 1)]
    tail = sum(probabilities[correct:])
    most = max(
        (sum(probabilities[max(correct - i, 0) : correct]) / i for i in range(1, canaries + 1)),
        default=0.0,
    )
    return min(1.0, tail + 2 * canaries * delta * most)


def fdp_rejects(canaries: int, guesses: int, correct: int, mu: float, significance: float) -> bool:
    """Mahloujifar, Melis and Chaudhuri (2024), Algorithm 3, for Gaussian trade-offs."""
    h = {correct: significance * (guesses - correct) / canaries}
    r = {correct: significance * correct / canaries}
    for i in range(correct - 1, -1, -1):
        shifted = float(stats.norm.cdf(stats.norm.ppf(r[i + 1]) - mu))
        h[i] = max(h[i + 1], shifted)
        r[i] = r[i + 1] + i / (guesses - i) * (h[i] - h[i + 1])
    return r[0] + h[0] > guesses / canaries


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of a Gaussian mechanism (Dong, Roth and Su 2022, Corollary 2.13)."""

    def gap(epsilon: float) -> float:
        ahead = stats.norm.cdf(-epsilon / mu + mu / 2)
        return float(ahead - math.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)) - delta

    return root(gap, 0.0, 100.0) if gap(0.0) > 0 else 0.0
