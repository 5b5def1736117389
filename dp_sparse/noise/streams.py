"""Secret keys, and the streams of random bits that a step draws from them.

### Formal Guarantees
A key is 128 bits of `os.urandom` (64 of Philox, 64 on its counter), lives in untracked variables,
is never a constant of a graph and never saved. The child of a fork has other keys than its parent,
in graphs that were traced before, too. (Only the keys of a plan of `not_private_plan` follow from a
seed.) Streams (draw, purpose) are disjoint ranges of the counter. Philox is not a cryptographic
generator.
"""

import ctypes
import enum
import os
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import key_bytes, replicas

_PURPOSE_BITS = 24
_MOST_DRAWS = 2 ** (64 - _PURPOSE_BITS)  # of one key, whose streams are disjoint up to there
_KEYS: "weakref.WeakSet[NoiseKey]" = weakref.WeakSet()  # all of this process


class Purpose(enum.IntEnum):
    """What a stream is for. Each purpose of each draw has its own stream, so no value repeats."""

    CONTRIBUTION = 0
    SKIPS = 1
    ROWS = 2
    UNCLIPPED = 3
    SEEDS = 4
    PICKS = 5
    DENSE = 6  # plus the index of the variable, or of the first of several small ones
    NEGATIVES = 2**19  # plus the number of the layer that draws them
    DELAYED = 2**20  # plus the index of the lookup


class NoiseKey:
    """A secret key and the count of draws made with it.

    Copying, saving, restoring and forking never repeat a draw: this is no trackable object, so
    neither checkpoints nor `get_config` contain it, and a copy or a pickle of its owner gets a
    fresh key, as does the child of a fork.

    Args:
        not_private_seed: What all keys follow from in a run for debugging, which has no privacy.
        steps: Of such a run, before the key is used.
    """

    def __init__(self, not_private_seed: int | None = None, steps: int = 0) -> None:
        self._seed = not_private_seed
        self._bytes = key_bytes(not_private_seed, "noise", steps)
        self._key, self._offset, self._draws = replicas.undistributed(self._variables)
        self._hold()

    def refresh(self, steps: int) -> None:
        """Replaces the key by a new one, for a run that goes on after `steps` steps."""
        self._bytes = key_bytes(self._seed, "noise", steps)
        self._key.assign(self._fresh_word())
        self._offset.assign(self._fresh_word())
        self._hold()

    def replace(self, words: tf.Tensor) -> None:
        """Takes a new key, int64 `[2]`, that several workers share; draws count from 0."""
        self._key.assign(tf.bitcast(words[:1], tf.uint64))
        self._offset.assign(tf.bitcast(words[1:], tf.uint64))
        self._draws.assign(0)
        self._hold()

    def renew_in_memory(self) -> None:
        """A new key in the child of a fork, without TensorFlow, whose locks a lost thread may hold.

        It writes the bytes of the variables themselves, so that graphs read the new key as well.
        """
        for word in self._held if self._seed is None else ():
            ctypes.memmove(word.ctypes.data, os.urandom(word.nbytes), word.nbytes)

    def words(self) -> tf.Tensor:
        """The key and the count of draws, int64 `[1, 3]`; where they are equal, draws are equal."""
        words = tf.concat([self._key.read_value(), self._offset.read_value()], 0)
        words = tf.concat([tf.bitcast(words, tf.int64), self._draws.read_value()[tf.newaxis]], 0)
        return words[tf.newaxis]

    def next_draw(self) -> "Draw":
        """The streams of the next step, never the same twice under one key.

        This holds whatever `iterations` is set to, and in several threads: the operation reads and
        counts under one lock.
        """
        draw = tf.raw_ops.ResourceCountUpTo(
            resource=self._draws.handle, limit=_MOST_DRAWS, T=tf.int64
        )
        return Draw(self._key.read_value(), draw, self._offset.read_value()[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> "NoiseKey":
        return NoiseKey(self._seed)

    def __reduce__(self) -> tuple[type["NoiseKey"], tuple[int | None]]:
        return NoiseKey, (self._seed,)

    def _variables(self) -> tuple[tf.Variable, tf.Variable, tf.Variable]:
        """Key, offset and count, in memory that Python reaches; CPUs alone count under a lock."""
        with tf.device("CPU:0"):
            draws = tf.Variable(np.int64(0), trainable=False)
            return *(tf.Variable(self._fresh_word(), trainable=False) for _ in range(2)), draws

    def _hold(self) -> None:
        """Keeps the memory of key and offset at hand, for `renew_in_memory`."""
        with tf.init_scope():
            both = self._key.read_value(), self._offset.read_value()
        self._held = [np.asarray(memoryview(word)) for word in both]
        _KEYS.add(self)

    def _fresh_word(self) -> np.ndarray:
        return np.frombuffer(self._bytes(8), np.uint64)


def _renew_all() -> None:
    for key in _KEYS:
        key.renew_in_memory()


os.register_at_fork(after_in_child=_renew_all)


class Draw:
    """The random streams of one step.

    Attributes:
        key: uint64 `[1]`.
        number: int64 scalar, below 2⁴⁰.
        offset: uint64 scalar: secret bits at which the counters start, in addition to the key.
    """

    def __init__(self, key: tf.Tensor, number: tf.Tensor, offset: tf.Tensor) -> None:
        self.key = key
        self.number = number
        self.offset = offset
        begin = tf.bitcast(number * 2**_PURPOSE_BITS, tf.uint64)  # whose low bits are 0
        self._begin = tf.bitwise.bitwise_xor(begin, offset)

    def tensors(self) -> list[tf.Tensor]:
        """The tensors that define it."""
        return [self.key, self.number, self.offset]

    def counter(self, purpose: int) -> tf.Tensor:
        """Where the stream of a purpose begins: uint64 `[2]`, low word first."""
        high = tf.bitwise.bitwise_xor(self._begin, tf.constant(purpose, tf.uint64))
        return tf.stack([tf.zeros([], tf.uint64), high])
