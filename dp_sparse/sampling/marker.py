"""The marker of a batch, which proves which sampler made it.

A marker, int64 `[capacity, 4]`, has for each example of a batch [fingerprint of the sampler, nonce
of the pass over the sampler, position of the batch in the pass, place of the example in the batch].
The training step refuses a batch that has no marker, is of another sampler, was seen before, or is
not whole: each would void the accounting. A nonce of 0 means that a seed made the batch, so its
sampling is not secret. A nonce of 1 means that its examples follow from its position, however often
and by whom they are read.
"""

import threading
import time
from typing import NamedTuple

import numpy as np

SEEDED = 0
OWN_ORDER = 1


class Marker(NamedTuple):
    """Where a batch came from: what an entry of its marker begins with."""

    fingerprint: int
    nonce: int
    position: int

    def of_examples(self, count: int, begin: int = 0) -> np.ndarray:
        """The marker of `count` examples of a batch from place `begin` on, `[count, 4]`."""
        fields = np.tile(np.array(self, np.int64), (count, 1))
        return np.column_stack([fields, np.arange(begin, begin + count, dtype=np.int64)])


def new_nonce(seed: int | None) -> int:
    """A number that names one pass over a sampler, larger than all before.

    `SEEDED` if a seed makes the pass predictable.
    """
    return SEEDED if seed is not None else _NONCES.next()


class _Nonces:
    """Increasing numbers: a later pass has the larger one.

    This also holds between processes, as far as their clocks agree.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, time.time_ns())
            return self._last


_NONCES = _Nonces()
