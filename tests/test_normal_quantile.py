"""The inverse of the normal distribution function: accuracy, smoothness, its coefficients."""

import mpmath
import numpy as np
import pytest
import tensorflow as tf
from scipy import special

from dp_sparse import normal_quantile as module
from tests.reference import normal_quantile as reference


def quantile(v: np.ndarray) -> np.ndarray:
    compiled = tf.function(module.normal_quantile, jit_compile=True, autograph=False)
    return compiled(tf.constant(v, tf.float64)).numpy()


def lower_half() -> np.ndarray:
    """v in (−1, 0): dense everywhere and down to the last float64 above −1."""
    rng = np.random.default_rng(0)
    tails = 2.0 ** -rng.uniform(1, 53, 200_000)
    return np.concatenate([-rng.random(200_000), tails - 1, 2.0 ** -np.arange(1, 54.0) - 1])


def test_relative_error_is_below_1e_11() -> None:
    v = lower_half()
    v = v[v < -1e-15]
    np.testing.assert_allclose(quantile(v), special.ndtri((1 + v) / 2), rtol=1e-11)


def test_against_forty_digits() -> None:
    """SciPy's own error does not hide ours."""
    v = lower_half()[::4001]
    with mpmath.workdps(40):
        expected = [float(mpmath.sqrt(2) * mpmath.erfinv(mpmath.mpf(each))) for each in v.tolist()]
    np.testing.assert_allclose(quantile(v), expected, rtol=1e-11)


def test_odd_and_near_zero() -> None:
    v = lower_half()
    np.testing.assert_array_equal(quantile(-v), -quantile(v))
    tiny = np.array([2.0**-53, 2.0**-40, 1e-8])
    np.testing.assert_allclose(quantile(tiny), tiny * np.sqrt(np.pi / 2), rtol=1e-11)


def test_increasing_across_the_seams_of_the_logarithm() -> None:
    """Where 1 − v² passes a power of two times √½ the mantissa's interval changes."""
    for power in range(1, 50, 6):
        seam = np.sqrt(1 - np.sqrt(0.5) * 2.0**-power)
        v = seam + np.arange(-1000, 1000) * 2.0**-53 * 2.0 ** max(0, 20 - power)
        v = v[v < 1]
        assert np.all(np.diff(quantile(v)) >= -1e-14)
        np.testing.assert_allclose(quantile(-v), special.ndtri((1 - v) / 2), rtol=1e-11)


@pytest.mark.parametrize("name", ["log", "quantile"])
def test_coefficients_are_those_of_the_fit(name: str) -> None:
    if name == "log":
        fitted, ours = reference.log_ratio(), (module._LOG_NUMERATOR, module._LOG_DENOMINATOR)
    else:
        fitted = reference.quantile_ratio(int(module._SHIFT), 36.1)
        ours = module._NUMERATOR, module._DENOMINATOR
    for right, found in zip(fitted, ours, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-9)
