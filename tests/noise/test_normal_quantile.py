"""The inverse of the normal distribution function: accuracy, smoothness, its coefficients."""

import mpmath
import numpy as np
import pytest
import tensorflow as tf
from scipy import special

from dp_sparse.noise import gaussian
from tests.reference import normal_quantile as reference


def quantile(tail: np.ndarray) -> np.ndarray:
    compiled = tf.function(gaussian.normal_quantile, jit_compile=True, autograph=False)
    return compiled(tf.constant(tail, tf.float64)).numpy()


def tails() -> np.ndarray:
    """From 1 down to the smallest that noise uses, dense at both ends."""
    rng = np.random.default_rng(0)
    small = 2.0 ** -rng.uniform(0, 64, 200_000)
    return np.concatenate([rng.random(200_000), small, 1 - small, 2.0 ** -np.arange(65.0)])


def test_relative_error_is_below_3e_11() -> None:
    """Near 1 SciPy's own argument has no digits left: `test_near_zero` looks there."""
    tail = tails()
    tail = tail[tail < 0.999]
    np.testing.assert_allclose(quantile(tail), special.ndtri(tail / 2) * -1, rtol=3e-11)


def test_against_forty_digits() -> None:
    """SciPy's own error does not hide ours."""
    tail = tails()[::4001]
    with mpmath.workdps(40):
        expected = [
            float(mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.mpf(each))) for each in tail.tolist()
        ]
    np.testing.assert_allclose(quantile(tail), expected, rtol=3e-11)


def test_near_zero() -> None:
    """A tail of 1 is the middle of the distribution."""
    assert quantile(np.array([1.0])) == 0
    tiny = np.array([2.0**-53, 2.0**-40, 2.0**-27])
    np.testing.assert_allclose(quantile(1 - tiny), tiny * np.sqrt(np.pi / 2), rtol=3e-11)


def rounding_of_quantile(tail: np.ndarray) -> float:
    """Relative error of Horner's rule without fused products, to first order: 2·19 roundings.

    Each of them may take its part of the sum of the terms' sizes, over the sum (Higham 2002, 5.3).
    """
    powers = np.sqrt(gaussian._SHIFT - np.log(tail * (2 - tail))).max() ** np.arange(10)
    terms = [powers * np.array(c) for c in (gaussian._NUMERATOR, gaussian._DENOMINATOR)]
    return 19 * 2.0**-53 * sum(np.sum(np.abs(each)) / abs(np.sum(each)) for each in terms)


def test_decreasing_across_the_seams_of_the_logarithm() -> None:
    """Where t(2 − t) passes a power of two times √½ the mantissa's interval changes."""
    for power in range(1, 62, 6):
        seam = 1 - np.sqrt(1 - np.sqrt(0.5) * 2.0**-power) if power < 20 else 2.0**-power / 8**0.5
        tail = seam * (1 + np.arange(-1000, 1000) * 2.0**-40)
        values = quantile(tail)
        assert np.all(np.diff(values) <= 2 * values[0] * rounding_of_quantile(tail))
        np.testing.assert_allclose(quantile(tail), special.ndtri(tail / 2) * -1, rtol=3e-11)


@pytest.mark.parametrize("name", ["log", "quantile"])
def test_coefficients_are_those_of_the_fit(name: str) -> None:
    if name == "log":
        fitted, ours = reference.log_ratio(), (gaussian._LOG_NUMERATOR, gaussian._LOG_DENOMINATOR)
    else:
        fitted = reference.quantile_ratio(int(gaussian._SHIFT), reference.LONGEST)
        ours = gaussian._NUMERATOR, gaussian._DENOMINATOR
    for right, found in zip(fitted, ours, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-9)
