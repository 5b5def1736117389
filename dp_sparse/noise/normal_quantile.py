"""The inverse of the normal distribution function in float64, as elementwise operations for XLA.

The z > 0 with P[|Z| > z] = t is (1 − t) · R(√(4 − log(t(2 − t)))) with one rational R over the
whole range: no branch, two divisions and one root, about a quarter of the cost of `erfinv`. The
relative error is below 3·10⁻¹¹, a millionth of the grid on which noise is released.
`tests/reference/normal_quantile.py` computes the coefficients.
"""

import math

import tensorflow as tf

_SHIFT = 4.0
_NUMERATOR = (
    0.13088597728308213,
    -0.06675866912244588,
    -0.13849732220109856,
    0.30808041287687477,
    -0.2962672710189529,
    0.17511840543650903,
    -0.06729974845800733,
    0.0166656983313251,
    -0.002437686823384768,
    0.00016553368728236794,
)
_DENOMINATOR = (
    0.5347964982256652,
    -0.8284262207275664,
    0.6818157963823825,
    -0.38677350727186594,
    0.16647838721150296,
    -0.05373115459631407,
    0.01223162659414495,
    -0.0017321629713204039,
    0.00011762741575883427,
    -1.2877858414636675e-08,
)
_LOG_NUMERATOR = (
    0.8672322316888086,
    1.6477929426077331,
    0.9820923823992581,
    0.187222582681333,
    0.004074567243580257,
    -0.0001330952660562216,
)
_LOG_DENOMINATOR = (
    0.8672322316887235,
    2.0814090584517753,
    1.7337195010974338,
    0.5770873717227691,
    0.061617568652645185,
)
_ROOT_OF_HALF = 0x3FE6A09E667F3BCD  # the bits of √½
_MANTISSA_BITS = 52


def normal_quantile(tail: tf.Tensor) -> tf.Tensor:
    """The z ≥ 0 with P[|Z| > z] = `tail` for a standard normal Z; float64, `tail` in [2⁻⁶⁴, 1]."""
    s = tf.sqrt(_SHIFT - _log(tail * (2.0 - tail)))
    return (1.0 - tail) * _polynomial(_NUMERATOR, s) / _polynomial(_DENOMINATOR, s)


def _log(positive: tf.Tensor) -> tf.Tensor:
    """The natural logarithm of normal numbers, absolute error 10⁻¹³.

    Written out because XLA's own takes twice the time.
    """
    bits = tf.bitcast(positive, tf.int64)
    mantissa_bits = tf.constant(_MANTISSA_BITS, tf.int64)
    exponent = tf.bitwise.right_shift(bits - _ROOT_OF_HALF, mantissa_bits)
    mantissa = tf.bitcast(bits - tf.bitwise.left_shift(exponent, mantissa_bits), tf.float64)
    f = mantissa - 1.0  # in [√½ − 1, √2 − 1)
    log_mantissa = f * _polynomial(_LOG_NUMERATOR, f) / _polynomial(_LOG_DENOMINATOR, f)
    return tf.cast(exponent, tf.float64) * math.log(2.0) + log_mantissa


def _polynomial(coefficients: tuple[float, ...], x: tf.Tensor) -> tf.Tensor:
    value = tf.constant(coefficients[-1], tf.float64)
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value
