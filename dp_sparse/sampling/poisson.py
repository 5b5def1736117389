"""True Poisson sampling: every example joins every batch independently with probability q = B / N.

Batches are drawn by geometric skips over the N examples, O(B) a batch, and padded to a fixed
capacity. The probability that one exceeds it is part of δ (T·(1 + e^ε)·P[Bin(N, q) > capacity]).
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
import numpy as np
import scipy.stats
import tensorflow as tf

from dp_sparse.core import PrivacyError, key_bytes, validate
from dp_sparse.sampling import base, data_source
from dp_sparse.sampling.augmentation import Augment, augmented
from dp_sparse.sampling.base import BatchPart, Sampling
from dp_sparse.sampling.batch import Marker, new_nonce
from dp_sparse.sampling.skips import bernoulli_positions

_LARGEST_EPSILON = 20.0  # for which the default capacity is made; from 8 to 20 it grows by some 3 %


@dataclasses.dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Independent sampling of every example at every step, with its privacy amplification.

    Attributes:
        num_examples: N, public.
        expected_batch_size: B; gradients are divided by it.
        steps: T, batches in the whole run; or give `epochs`.
        capacity: Leading dimension of a batch. By default the smallest for which batches that
            exceed it add at most 1e-3 / N to δ at ε = 20.

    Args:
        epochs: In place of `steps`: how often an example is expected to be drawn in all, > 0. T is
            epochs·N/B, rounded, and at least 1. `fit` then counts in these epochs.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> sampling = dp_sparse.PoissonSampling(1000, expected_batch_size=100, steps=2)
        >>> sampling.sampling_probability, sampling.capacity
        (0.1, 183)
        >>> batches = sampling.batches((np.arange(1000), np.ones(1000)))  # for `model.fit`
        >>> [tuple(x.shape) for x, y, weights in batches]  # padded, with weights of 0
        [(183,), (183,)]

        With random changes of each example, here of images:

        >>> import tensorflow as tf
        >>> flip = tf.image.stateless_random_flip_left_right
        >>> augment = lambda x, y, seed: (flip(x, seed), y)
        >>> images = np.zeros((1000, 8, 8, 3), np.float32)
        >>> batches = sampling.batches((images, np.ones(1000)), augment=augment)
        >>> batches.element_spec[0].shape.as_list()
        [183, 8, 8, 3]

    ### Formal Guarantees
    Neighbouring datasets differ by adding or removing one example. Amplification needs the sampling
    key to stay secret. It is drawn from `os.urandom` for each pass, and private training refuses a
    pass with a seed. So are the seeds of `augment` (see `augmentation`).
    """

    num_examples: int
    expected_batch_size: float
    steps: int = 0
    capacity: int | None = None
    epochs: dataclasses.InitVar[float | None] = None
    _epochs: float | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self, epochs: float | None) -> None:
        self._set("num_examples", validate.positive_integer)
        self._set("expected_batch_size", validate.positive)
        if epochs is not None:
            object.__setattr__(self, "steps", self._steps_of(epochs))
            object.__setattr__(self, "_epochs", float(epochs))
        elif self.steps == 0 and not isinstance(self.steps, bool):
            raise ValueError("Expected steps > 0, or epochs= in its place, got steps=0.")
        self._set("steps", validate.positive_integer)
        if self.expected_batch_size > self.num_examples:
            raise ValueError(
                f"Expected expected_batch_size <= num_examples={self.num_examples}, got "
                f"expected_batch_size={self.expected_batch_size}."
            )
        if self.capacity is None:
            object.__setattr__(self, "capacity", self._default_capacity())
        self._set("capacity", validate.positive_integer)

    def _steps_of(self, epochs: float) -> int:
        drawn = validate.positive("epochs", epochs) * self.num_examples
        steps = max(1, round(drawn / self.expected_batch_size))
        if self.steps not in (0, steps):  # a description has both
            raise ValueError(
                f"Expected steps= or epochs=, got both, steps={self.steps} and epochs={epochs}: "
                "leave one."
            )
        return steps

    @property
    def steps_per_epoch(self) -> float | None:
        """N / B, if `epochs` were given in place of `steps`."""
        return None if self._epochs is None else self.num_examples / self.expected_batch_size

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal object."""
        config = {name: value for name, value in super().get_config().items() if name != "_epochs"}
        return config if self._epochs is None else {**config, "epochs": self._epochs}

    @property
    def sampling_probability(self) -> float:
        """q = B / N."""
        return self.expected_batch_size / self.num_examples

    @property
    def batch_capacity(self) -> int:
        """The leading dimension of every batch."""
        assert self.capacity is not None
        return self.capacity

    @property
    def neighbouring(self) -> str:
        """The relation for which the amplification is proved."""
        return "one has an example that the other lacks (add or remove)"

    @property
    def description(self) -> str:
        """Two lines for the statement."""
        return (
            f"Poisson sampling puts each of {self.num_examples} examples in each batch with "
            f"probability {self.sampling_probability:.6g}, by a secret key.\n"
            f"A batch of more than {self.batch_capacity} examples stops the run, and the "
            "probability of that is inside delta."
        )

    def event(self, mechanism: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """`steps` Poisson-subsampled runs of `mechanism`."""
        if self.sampling_probability == 1:
            return dp_accounting.SelfComposedDpEvent(mechanism, steps)
        sampled = dp_accounting.PoissonSampledDpEvent(self.sampling_probability, mechanism)
        return dp_accounting.SelfComposedDpEvent(sampled, steps)

    def participations(self, steps: int) -> float:
        """`steps`·q."""
        return steps * self.sampling_probability

    def overflow_delta(self, epsilon: float, steps: int) -> float:
        """T·(1 + e^ε)·P[Bin(N, q) > capacity]."""
        return (
            steps
            * (1 + math.exp(min(epsilon, 700.0)))
            * self._overflow_probability(self.batch_capacity)
        )

    def batches(
        self,
        source: Any,
        *,
        class_weight: dict[int, float] | None = None,
        augment: Augment | None = None,
        seed: int | None = None,
    ) -> tf.data.Dataset:
        """The run's `steps` batches, each `[capacity, ...]` with zeros for padding.

        Args:
            source: `(x, y)` or `(x, y, sample_weight)` arrays, a `RecordFile`, or a
                `tf.data.Dataset` of single examples with random access (about 20 µs an example).
            class_weight: A factor for the sample weight of each label. It is given here because
                `fit` refuses it when batches have weights.
            augment: Changes each example at random: `f(x, y, seed)`, given one example and a secret
                seed of its own, int32 `[2]`, returns x and y. See docs/data.md.
            seed: For tests of the sampler only: private training refuses the batches.

        Raises:
            ValueError: The data source does not hold exactly `num_examples` examples, or `augment`
                is no such function.
            PrivacyError: A dataset or `augment` draws random numbers that can be predicted; while
                iterating, a batch is larger than the capacity, or the source gives an example
                another row in another batch.
        """

        def new_pass() -> tuple[int, int]:
            key = int.from_bytes(os.urandom(16), "little") if seed is None else seed
            return key, new_nonce(seed)

        whole = (0, self.batch_capacity)
        drawn = self._dataset(source, new_pass, whole, self.steps, class_weight)
        return augmented(drawn, augment, key_bytes(seed, "augmentation", 0))

    def batches_of(
        self,
        source: Any,
        part: BatchPart,
        *,
        first_step: int,
        class_weight: dict[int, float] | None = None,
    ) -> tf.data.Dataset:
        """One worker's part of `steps - first_step` batches that all workers draw with one key.

        Args: as `batches`. Every worker has the whole data source and reads only its part.
        """
        secrets, places = (part.key, part.nonce), (part.begin, part.end)
        return self._dataset(source, lambda: secrets, places, self.steps - first_step, class_weight)

    def _dataset(
        self,
        source: Any,
        new_pass: Callable[[], tuple[int, int]],
        part: tuple[int, int],
        steps: int,
        class_weight: dict[int, float] | None,
    ) -> tf.data.Dataset:
        hint = data_source.batch_hint(source)
        source = data_source.as_data_source(source)
        if len(source) != self.num_examples:
            raise ValueError(
                f"Expected a data source of num_examples={self.num_examples} examples, got "
                f"{len(source)}: the sampling probability depends on it, and with it the guarantee."
                f"{hint}"
            )

        def draws() -> Iterator[tuple[np.ndarray, Marker]]:
            key, nonce = new_pass()
            rng = np.random.Generator(np.random.Philox(key=key))
            for index in range(steps):
                mark = Marker(self.fingerprint, nonce, index)
                yield self._within_capacity(self.draw(rng)), mark

        return base.gathered_batches(source, draws, part, steps, class_weight)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """One Poisson sample of example indices, int64 sorted `[n]`, by geometric skips."""
        return bernoulli_positions(rng, self.sampling_probability, self.num_examples)

    def _within_capacity(self, indices: np.ndarray) -> np.ndarray:
        if len(indices) > self.batch_capacity:
            raise PrivacyError(
                f"Expected at most capacity={self.batch_capacity} examples in a batch, got "
                f"{len(indices)}: the run stops here, as its delta assumes. Start again with a "
                "larger capacity."
            )
        return indices

    def _overflow_probability(self, capacity: int) -> float:
        return float(scipy.stats.binom.sf(capacity, self.num_examples, self.sampling_probability))

    def _default_capacity(self) -> int:
        target = 1e-3 / self.num_examples / (self.steps * (1 + math.exp(_LARGEST_EPSILON)))
        low, high = math.floor(self.expected_batch_size), self.num_examples
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle)
                if self._overflow_probability(middle) <= target
                else (middle + 1, high)
            )
        return low
