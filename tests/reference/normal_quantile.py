"""The coefficients of `dp_sparse.normal_quantile`, from scratch: `python -m
tests.reference.normal_quantile` prints them.

Rational functions are fitted in 40 digits by least squares on Chebyshev nodes, each round with the
weights of the last one's denominator and error (Loeb's and Lawson's iterations), which comes close
to the smallest maximal error.
"""

from collections.abc import Callable

import mpmath
from mpmath import mpf

_NODES = 120
_ROUNDS = 12
_DIGITS = 40
LONGEST = 43.7  # −log of t(2 − t) at t = 2⁻⁶⁴ is 43.67


def log_ratio() -> tuple[list[float], list[float]]:
    """log(1 + f) / f for f in [√½ − 1, √2 − 1]: numerator and denominator, constant term first."""
    with mpmath.workdps(_DIGITS):
        low, high = mpmath.sqrt(mpf(1) / 2) - 1, mpmath.sqrt(2) - 1
        return _fitted(lambda f: mpmath.log1p(f) / f, low, high, 5, 4)


def quantile_ratio(shift: int, longest: float) -> tuple[list[float], list[float]]:
    """Φ⁻¹((1 + v) / 2) / v as a function of s = √(shift − log(1 − v²)), −log up to `longest`.

    With v = 1 − t, the size of a normal whose tail is t, and 1 − v² = t(2 − t).
    """
    with mpmath.workdps(_DIGITS):
        low, high = mpmath.sqrt(shift), mpmath.sqrt(shift + mpf(longest))
        return _fitted(lambda s: _quantile_over_v(s * s - shift), low, high, 9, 9)


def _quantile_over_v(minus_log: mpf) -> mpf:
    v = mpmath.sqrt(-mpmath.expm1(-minus_log))
    return mpmath.sqrt(2) * mpmath.erfinv(v) / v


def _fitted(
    function: Callable[[mpf], mpf], low: mpf, high: mpf, above: int, below: int
) -> tuple[list[float], list[float]]:
    middle, half = (low + high) / 2, (high - low) / 2
    nodes = [mpmath.cos(mpmath.pi * (2 * k + 1) / (2 * _NODES)) for k in range(_NODES)]
    values = [function(middle + half * node) for node in nodes]
    weights = [mpf(1)] * _NODES
    lawson = [mpf(1)] * _NODES
    best_error, best = mpmath.inf, ([], [])
    for _ in range(_ROUNDS):
        numerator, denominator = _solved(nodes, values, weights, lawson, above, below)
        tops = [mpmath.polyval(numerator[::-1], node) for node in nodes]
        bottoms = [mpmath.polyval(denominator[::-1], node) for node in nodes]
        errors = [
            abs(top / bottom / value - 1)
            for top, bottom, value in zip(tops, bottoms, values, strict=True)
        ]
        worst = max(errors)
        if worst < best_error and min(bottoms) > 0:
            best_error, best = worst, (numerator, denominator)
        weights = [1 / abs(bottom) for bottom in bottoms]
        lawson = [
            old * mpmath.sqrt(error / worst + mpf("1e-3"))
            for old, error in zip(lawson, errors, strict=True)
        ]
        lawson = [weight / max(lawson) for weight in lawson]
    numerator, denominator = (_unscaled(polynomial, middle, half) for polynomial in best)
    return [float(c) for c in numerator], [float(c) for c in denominator]


def _solved(
    nodes: list[mpf],
    values: list[mpf],
    weights: list[mpf],
    lawson: list[mpf],
    above: int,
    below: int,
) -> tuple[list[mpf], list[mpf]]:
    """Least squares of p − value·q, relative, with q(0) = 1."""
    system = mpmath.matrix(_NODES, above + below + 1)
    wanted = mpmath.matrix(_NODES, 1)
    for row, node in enumerate(nodes):
        scale = weights[row] * lawson[row] / values[row]
        for power in range(above + 1):
            system[row, power] = scale * node**power
        for power in range(1, below + 1):
            system[row, above + power] = -scale * values[row] * node**power
        wanted[row] = scale * values[row]
    solution = mpmath.lu_solve(system.T * system, system.T * wanted)
    coefficients = [solution[i] for i in range(above + below + 1)]
    return coefficients[: above + 1], [mpf(1), *coefficients[above + 1 :]]


def _unscaled(polynomial: list[mpf], middle: mpf, half: mpf) -> list[mpf]:
    """A polynomial in (x − middle) / half as one in x."""
    result = [mpf(0)] * len(polynomial)
    for power, coefficient in enumerate(polynomial):
        for low in range(power + 1):
            result[low] += (
                coefficient / half**power * mpmath.binomial(power, low) * (-middle) ** (power - low)
            )
    return result


if __name__ == "__main__":
    for name, (numerator, denominator) in {
        "log": log_ratio(),
        "quantile": quantile_ratio(4, LONGEST),
    }.items():
        print(name, "numerator", numerator)
        print(name, "denominator", denominator)
