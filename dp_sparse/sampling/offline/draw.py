"""Which steps each example joins, drawn before training: Poisson sampling without random access.

Every pair of an example and a step is a coin of probability q = B / N, as in `PoissonSampling`;
here all coins of an example are thrown when it is prepared, by geometric skips over the T steps. A
shuffle by step then brings each batch together. The coins follow from a secret key, the name of the
shard and the place of the example in it, so a worker that prepares a shard twice throws the same.

Time and memory are those of the pairs: T·q an example.
"""

import dataclasses
import hashlib
import hmac
import os
from typing import NoReturn

import numpy as np

from dp_sparse.core import PrivacyError, validate
from dp_sparse.sampling.skips import heads

CHUNK = 2**16  # examples whose coins come from one generator
KEY_BYTES = 32


@dataclasses.dataclass(frozen=True)
class OfflineDraw:
    """The coins of all examples, for one run of T steps.

    Attributes:
        key: Secret, 32 bytes: whoever knows it knows the batches.
        sampling_probability: q.
        steps: T.

    Examples:
        >>> from dp_sparse import offline
        >>> draw = offline.OfflineDraw(offline.new_key(), sampling_probability=0.1, steps=20)
        >>> places, steps = draw.of_chunk("day 3", 0)  # of its first 65,536 examples
        >>> bool(0 <= min(steps) and max(steps) < 20)
        True

    ### Formal Guarantees
    Joins are independent over examples and steps, each with probability q, to whoever does not know
    the key. It cannot be pickled, so that no job description holds it.
    """

    key: bytes = dataclasses.field(repr=False)
    sampling_probability: float
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise ValueError(f"Expected a key of {KEY_BYTES} bytes, as new_key() makes them.")
        if not 0 < validate.positive("sampling_probability", self.sampling_probability) <= 1:
            raise ValueError(
                "Expected sampling_probability <= 1, got "
                f"sampling_probability={self.sampling_probability}."
            )
        validate.positive_integer("steps", self.steps)

    def of_chunk(self, shard: str, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of examples `chunk`·2¹⁶ to (`chunk` + 1)·2¹⁶ − 1 of a shard.

        Args:
            shard: The name of the shard; no two shards of a data set may share one.
            chunk: Which chunk of its examples.

        Returns:
            Places of examples in the chunk, in [0, 2¹⁶), and their steps, in [0, T); int64
            `[pairs]`, sorted by example and then by step. Leave out places without an example.
        """
        message = b"dp_sparse offline Poisson\0" + chunk.to_bytes(8, "little") + shard.encode()
        words = hmac.digest(self.key, message, "sha256")[:16]
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(words, "little")))
        cells = heads(rng, self.sampling_probability, CHUNK * self.steps)
        return cells // self.steps, cells % self.steps

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("Expected the key of a draw to stay in its process, got a pickle of it.")


def new_key() -> bytes:
    """A secret key from the operating system.

    Examples:
        >>> from dp_sparse import offline
        >>> len(offline.new_key())
        32
    """
    return os.urandom(KEY_BYTES)


def draw_id(key: bytes) -> str:
    """The public name of all that a key draws: its SHA-256, in hexadecimal.

    Examples:
        >>> from dp_sparse import offline
        >>> offline.draw_id(bytes(32))
        '66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925'
    """
    return hashlib.sha256(key).hexdigest()
