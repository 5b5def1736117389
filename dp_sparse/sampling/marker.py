"""The marker of a batch, which proves which sampler made it.

A marker, int64 `[capacity, 4]`, has for each example of a batch [fingerprint of the sampler, nonce
of the pass over the sampler, position of the batch, number of the example]. The training step
refuses a batch without a marker, of another sampler, seen before, or not whole: each would void the
accounting. A nonce of 0 says that a seed made the batch, so its sampling is not secret; one of 1,
that its examples follow from its position, whoever reads them and how often.
"""

import threading
import time
from typing import NamedTuple

import numpy as np

SEEDED = 0
OWN_ORDER = 1


class Marker(NamedTuple):
    """Where a batch came from: what each row of its marker begins with."""

    fingerprint: int
    nonce: int
    position: int

    def rows(self, count: int, begin: int = 0) -> np.ndarray:
        """The marker of `count` rows of a batch from `begin` on, int64 `[count, 4]`."""
        fields = np.tile(np.array(self, np.int64), (count, 1))
        return np.column_stack([fields, np.arange(begin, begin + count, dtype=np.int64)])


def new_nonce(seed: int | None) -> int:
    """A name for one pass over a sampler, larger than all before.

    `SEEDED` when a seed makes the pass predictable.
    """
    return SEEDED if seed is not None else _NONCES.next()


class _Nonces:
    """Increasing numbers: a later pass has the larger one.

    This holds over processes too, as far as their clocks agree.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, time.time_ns())
            return self._last


_NONCES = _Nonces()
