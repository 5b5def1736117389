"""Counter-based randomness: Gaussian noise for tensors and rows, uniforms for geometric skips.

Every value is a function of (key, draw, purpose, index) through Philox, so all replicas draw the
same values without communicating. A normal takes 64 bits: a sign, and the tail (k + ½)·2⁻⁶³ whose
quantile is its size, in float64, up to 9.155 σ. (TensorFlow's own sampler ends at 5.68 σ, which is
too little for small δ.) Bits, transform, sum and division are one kernel of XLA: about 2 ns a value
on two cores.

### Formal Guarantees
Keys and streams are those of `streams`. δ includes what the noise cannot reach
(`accounting.mechanisms`).

Philox 4×32-10 as elementwise operations, which XLA fuses with whatever uses the bits.

TensorFlow's own op gives the same values, but under XLA it is a kernel of its own that writes them
to memory. Fused with the transform of the noise they cost a quarter of that. Paper: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.2.

The inverse of the normal distribution function in float64, as elementwise operations for XLA.

The z > 0 with P[|Z| > z] = t is (1 − t) · R(√(4 − log(t(2 − t)))) with one rational R over the
whole range: no branch, two divisions and one root, about a quarter of the cost of `erfinv`. The
relative error is below 3·10⁻¹¹, a millionth of the grid on which noise is released.
`tests/reference/normal_quantile.py` computes the coefficients.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import scipy.special
import tensorflow as tf

from dp_sparse.core import rare_branch, xla
from dp_sparse.noise.streams import Draw, Purpose

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_COLUMNS = 1024
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
Number: TypeAlias = float | tf.Tensor
_PHILOX = 1
REACH = 8.2  # deviations up to which 64 bits reach each point of `grid_step` by ten values or more
_BLOCK = 2**12  # a number of values that changes is drawn in blocks: XLA needs fixed shapes
_FEW = 2**10  # so many values have a kernel of their own, which saves most of a block
_LARGE = 2**14  # a tensor with at least as many values has a kernel of its own size
_UNIT = 2**10  # small tensors are drawn together, in a multiple of this many values


def random_words(key: tf.Tensor, counter: tf.Tensor, count: int) -> tf.Tensor:
    """The first `count` values that `StatelessRandomUniformFullIntV2` gives, uint64 `[count]`.

    Call it under `jit_compile`: it costs O(count) time, and no tensor in memory once fused.

    Args:
        key: uint64 `[1]`.
        counter: uint64 `[2]`, low word first, which stays below 2⁶³ within the stream.
        count: How many values, a Python number.
    """
    number = _lanes(2 * counter[0], count)
    first, second, third, fourth = _mixed(key[0], _shifted(number, 1), counter[1])
    odd = tf.cast(tf.bitwise.bitwise_and(number, _word(1)), tf.bool)  # a block makes two values
    low, high = tf.where(odd, third, first), tf.where(odd, fourth, second)
    low = tf.bitwise.bitwise_and(low, _word(0xFFFFFFFF))
    bits = tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, _word(32)), low)
    return tf.reshape(bits, [-1])[:count]


def _lanes(start: tf.Tensor, count: int) -> tf.Tensor:
    """start, start + 1, ..., at least `count` of them, uint64 `[lines, columns]`.

    The sum of a start that is no constant, lines and columns: XLA would keep a long range as a
    constant in memory.
    """
    lines = np.arange(-(-count // _COLUMNS), dtype=np.uint64) * np.uint64(_COLUMNS)
    return (start + lines)[:, tf.newaxis] + np.arange(_COLUMNS, dtype=np.uint64)


def _mixed(key: tf.Tensor, low: tf.Tensor, high: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """The four words of each block of the counter (low, high), in the lower halves of uint64.

    The upper halves may hold anything. They are masked just before each product, so that the
    compiler makes a 32-bit product of it, three times faster.
    """
    upper, mask = _word(32), _word(0xFFFFFFFF)  # once, since each constant costs a trace time
    multipliers, key_steps = [*map(_word, _MULTIPLIERS)], [*map(_word, _KEY_STEPS)]

    def product(multiplier: tf.Tensor, word: tf.Tensor) -> tf.Tensor:
        return multiplier * tf.bitwise.bitwise_and(word, mask)

    def higher(word: tf.Tensor) -> tf.Tensor:
        return tf.bitwise.right_shift(word, upper)

    x0, x1, x2, x3 = low, higher(low), high, higher(high)
    key0, key1 = key, higher(key)
    for _ in range(_ROUNDS):
        left, right = product(multipliers[0], x0), product(multipliers[1], x2)
        x0, x1 = _xor(_xor(higher(right), x1), key0), right
        x2, x3 = _xor(_xor(higher(left), x3), key1), left
        key0, key1 = key0 + key_steps[0], key1 + key_steps[1]
    return x0, x1, x2, x3


def _xor(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(left, right)


def _shifted(word: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(word, _word(bits))


def _word(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


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


def normal(draw: Draw, purpose: int, count: tf.Tensor) -> tf.Tensor:
    """`count` independent standard normals, float64 `[count]`; `count` may change each step."""
    start, known = draw.counter(purpose), tf.get_static_value(count)
    if known is not None and xla.static_shapes():
        return _standard_normal(random_words(draw.key, start, int(known)))

    def several() -> tf.Tensor:
        values = tf.map_fn(
            lambda index: _normals(draw.key, _skipped(start, index), _BLOCK),
            tf.range(-(-count // _BLOCK)),
            fn_output_signature=tf.TensorSpec([_BLOCK], tf.float64),
        )
        return tf.reshape(values, [-1])

    few = lambda: _normals(draw.key, start, _FEW)  # noqa: E731
    return tf.cond(tf.less_equal(count, _FEW), few, rare_branch(several))[:count]


def uniform(draw: Draw, purpose: int, count: tf.Tensor, offset: tf.Tensor | int = 0) -> tf.Tensor:
    """`count` uniforms (k + ½)·2⁻⁵³, float64 `[count]`, from value `offset` of the stream on.

    Args:
        draw: The step's streams.
        purpose: Which of them.
        count: How many values.
        offset: The first value, a multiple of 2 (a Philox block holds two).
    """
    start = draw.counter(purpose) + tf.stack(
        [tf.cast(offset, tf.uint64) // 2, tf.zeros([], tf.uint64)]
    )
    bits = tf.bitwise.right_shift(_bits(draw.key, start, [count]), tf.constant(11, tf.uint64))
    return (tf.cast(tf.bitcast(bits, tf.int64), tf.float64) + 0.5) * 2.0**-53


def seed_state(draw: Draw, part: tf.Tensor | int, index: int, dtype: str) -> tf.Tensor:
    """A state `[2]` for a Keras seed generator, secret and used once.

    Args:
        draw: The step's streams.
        part: The number of the part of the batch that uses it.
        index: The number of the random layer in that part, below 2¹⁶.
        dtype: Of the result, an integer type.
    """
    number = tf.cast(part, tf.uint64) * 2**16 + tf.constant(index, tf.uint64)
    start = draw.counter(Purpose.SEEDS) + tf.stack([number, tf.zeros([], tf.uint64)])
    return tf.cast(tf.bitcast(_bits(draw.key, start, [2]), tf.int64), dtype)


def noisy_means(
    totals: Sequence[tf.Tensor], deviation: Number, divisor: float, draw: Draw, purpose: int
) -> list[tf.Tensor]:
    """`noisy_mean` of each tensor. Shapes are static, and purposes count from `purpose` on.

    Each large tensor has a stream and a kernel. All small ones together take the stream of the
    first of them, its length rounded up, so that models of about one size use the same kernel:
    compiling one takes longer than a hundred steps of a small model.
    """
    numbers = _numbers(deviation, divisor)
    sizes = [total.shape.num_elements() for total in totals]
    small = [index for index, size in enumerate(sizes) if size < _LARGE]
    means: dict[int, tf.Tensor] = {}
    for index, size in enumerate(sizes):
        if size >= _LARGE:
            flat = tf.reshape(totals[index], [-1])
            means[index] = _noisy(flat, numbers, draw.key, draw.counter(purpose + index))
    if small:
        flat = _end_to_end([totals[index] for index in small])
        noisy = _noisy(flat, numbers, draw.key, draw.counter(purpose + small[0]))
        lengths = [sizes[index] for index in small]
        parts = tf.split(noisy, [*lengths, flat.shape[0] - sum(lengths)])
        means.update(zip(small, parts[:-1], strict=True))
    return [tf.reshape(means[index], total.shape) for index, total in enumerate(totals)]


def _end_to_end(totals: Sequence[tf.Tensor]) -> tf.Tensor:
    """All values, and zeros up to a multiple of `_UNIT`, float64."""
    flat = [tf.reshape(tf.cast(total, tf.float64), [-1]) for total in totals]
    length = sum(each.shape[0] for each in flat)
    return tf.concat([*flat, tf.zeros([-length % _UNIT], tf.float64)], 0)


def noisy_mean(
    total: tf.Tensor, deviation: Number, divisor: float, draw: Draw, purpose: int
) -> tf.Tensor:
    """`(total + N(0, deviation²)) / divisor` per entry, float32, of the shape of `total`.

    The noisy sum is rounded to the grid of `grid_step`. `total` is float32 or float64; `deviation`
    a Python number or a float64 scalar.
    """
    if total.shape.is_fully_defined():
        return noisy_means([total], deviation, divisor, draw, purpose)[0]
    numbers, start = _numbers(deviation, divisor), draw.counter(purpose)
    flat = tf.reshape(total, [-1])
    blocks = tf.maximum(1, -(-tf.size(flat) // _BLOCK))
    padded = tf.pad(flat, [[0, blocks * _BLOCK - tf.size(flat)]])

    def several() -> tf.Tensor:
        noisy = tf.map_fn(
            lambda block: _noisy(block[0], numbers, draw.key, _skipped(start, block[1])),
            (tf.reshape(padded, [blocks, _BLOCK]), tf.range(blocks)),
            fn_output_signature=tf.TensorSpec([_BLOCK], tf.float32),
        )
        return tf.reshape(noisy, [-1])

    one = lambda: _noisy(tf.reshape(padded, [_BLOCK]), numbers, draw.key, start)  # noqa: E731
    noisy = tf.cond(tf.equal(blocks, 1), one, rare_branch(several))
    return tf.reshape(noisy[: tf.size(flat)], tf.shape(total))


def _numbers(deviation: Number, divisor: float) -> tf.Tensor:
    deviation = tf.convert_to_tensor(deviation, tf.float64)
    return tf.stack([deviation, grid_step(deviation), tf.constant(1 / divisor, tf.float64)])


def grid_step(deviation: Number) -> tf.Tensor:
    """The grid on which noisy sums are released: the power of two in deviation · (2⁻¹⁰, 2⁻⁹].

    Sum and noise are added in float64, and the result is rounded to the grid, so that the low bits
    of a released value do not tell which sum it came from (Mironov 2012). The grid is so coarse
    that ten or more of the 2⁶⁴ random values lead to each point up to `REACH`, and so fine that
    rounding adds less than 10⁻⁶ of the noise's variance.

    Returns:
        float64 scalar.
    """
    bits = tf.bitcast(tf.convert_to_tensor(deviation, tf.float64), tf.int64)
    exponent = tf.bitwise.bitwise_and(bits, tf.constant(0x7FF << 52, tf.int64))
    return tf.bitcast(exponent, tf.float64) * 2.0**-9


@tf.function(jit_compile=True, autograph=False)
def _noisy(total: tf.Tensor, numbers: tf.Tensor, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    noise = _standard_normal(random_words(key, counter, total.shape.num_elements()))
    on_grid = tf.round((tf.cast(total, tf.float64) + numbers[0] * noise) / numbers[1])
    return tf.cast(on_grid * numbers[1] * numbers[2], tf.float32)


@tf.function(jit_compile=True, autograph=False)
def _normals(key: tf.Tensor, counter: tf.Tensor, count: int) -> tf.Tensor:
    return _standard_normal(random_words(key, counter, count))


def _skipped(counter: tf.Tensor, blocks: tf.Tensor) -> tf.Tensor:
    """The counter after `blocks` blocks of values; one count of Philox makes two."""
    return counter + tf.stack([tf.cast(blocks, tf.uint64) * (_BLOCK // 2), tf.zeros([], tf.uint64)])


def self_check() -> None:
    """Compares bits with TensorFlow's Philox and normals with SciPy.

    Raises:
        RuntimeError: This machine's TensorFlow computes the noise wrongly.
    """
    key = tf.constant([0x0123456789ABCDEF], tf.uint64)
    counter = tf.constant([2**40 + 3, 0xFEDCBA9876543210], tf.uint64)
    words = tf.function(random_words, jit_compile=True, autograph=False)
    got, wanted = words(key, counter, 9).numpy(), _bits(key, counter, [9]).numpy()
    _require_same("random bits", got, wanted, np.array_equal(got, wanted))
    extremes = np.array([0, 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**63 + 2**50], np.uint64)
    tails = ((extremes & np.uint64(2**63 - 1)).astype(np.float64) + 0.5) * 2.0**-63
    expected = np.where(extremes < 2**63, -1, 1) * scipy.special.ndtri(tails / 2)
    transform = tf.function(_standard_normal, jit_compile=True, autograph=False)
    normals = transform(tf.constant(extremes)).numpy()
    close = np.allclose(normals, expected, rtol=1e-10, atol=1e-15)
    _require_same("normal noise", normals, expected, close)


def _require_same(name: str, got: np.ndarray, expected: np.ndarray, same: bool) -> None:
    if not same:
        raise RuntimeError(
            f"This machine's TensorFlow computes {name} wrongly: expected {expected}, got {got}. "
            f"Use another TensorFlow build."
        )


def _bits(key: tf.Tensor, counter: tf.Tensor, shape: Any) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=tf.uint64
    )


def _standard_normal(bits: tf.Tensor) -> tf.Tensor:
    """A normal from 64 bits, float64: the upper one is its sign, the rest P[|Z| > size] · 2⁶³.

    The sign is set as a bit, which costs XLA half of what choosing between two values costs.
    """
    signed = tf.bitcast(bits, tf.int64)
    lower = tf.bitwise.bitwise_and(signed, tf.constant(2**63 - 1, tf.int64))
    size = normal_quantile((tf.cast(lower, tf.float64) + 0.5) * 2.0**-63)
    sign = tf.bitwise.bitwise_and(signed, tf.constant(-(2**63), tf.int64))
    return tf.bitcast(tf.bitwise.bitwise_or(tf.bitcast(size, tf.int64), sign), tf.float64)
