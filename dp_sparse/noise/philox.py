"""Philox 4×32-10 as elementwise operations, which XLA fuses with whatever uses the bits.

TensorFlow's own op gives the same values, but under XLA it is a kernel of its own that writes them
to memory. Fused with the transform of the noise they cost a quarter of that. Paper: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.2.
"""

import numpy as np
import tensorflow as tf

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_COLUMNS = 1024


def words(key: tf.Tensor, counter: tf.Tensor, count: int) -> tf.Tensor:
    """The first `count` values that `StatelessRandomUniformFullIntV2` gives, uint64 `[count]`.

    Call it under `jit_compile`: it costs O(count) time, and no tensor in memory once fused.

    Args:
        key: uint64 `[1]`.
        counter: uint64 `[2]`, low word first, which stays below 2⁶³ within the stream.
        count: How many values, a Python number.
    """
    number = _numbers(2 * counter[0], count)
    first, second, third, fourth = _mixed(key[0], _shifted(number, 1), counter[1])
    odd = tf.cast(tf.bitwise.bitwise_and(number, _word(1)), tf.bool)  # a block makes two values
    low, high = tf.where(odd, third, first), tf.where(odd, fourth, second)
    low = tf.bitwise.bitwise_and(low, _word(0xFFFFFFFF))
    bits = tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, _word(32)), low)
    return tf.reshape(bits, [-1])[:count]


def _numbers(start: tf.Tensor, count: int) -> tf.Tensor:
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
