"""Streams: each example once a pass, in the dataset's order, with no amplification by sampling.

For data that a pipeline reads once, such as an online log or files too large to index. An example
is in one batch of each pass, so a run of k passes composes k Gaussian mechanisms. O(batch) memory.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, validate
from dp_sparse.sampling import data_source, dataset_passes, gathered, marker
from dp_sparse.sampling.augmentation import Augment, augmented
from dp_sparse.sampling.base import BatchPart, Sampling


@dataclasses.dataclass(frozen=True)
class StreamSampling(Sampling):
    """Fixed batches, each example in exactly one of them a pass.

    Attributes:
        num_examples: N, the examples of one pass, public.
        batch_size: Examples in a batch. The last batch of a pass may have fewer, and is padded.
        passes: How often the whole stream is read.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4, passes=2)
        >>> sampling.steps
        4
        >>> batches = sampling.batches((np.arange(8), np.ones(8)))  # for `model.fit`
        >>> [x.numpy().tolist() for x, y, weights in batches]
        [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]

    ### Formal Guarantees
    Neighbouring datasets differ by zeroing out one example: padding of weight 0 replaces it.
    (Removing one would move all that follow it.) The order must not depend on the examples' values,
    and a data source must give each example once a pass, by itself. A dataset may shuffle, with any
    seed: where an example stands tells nothing of the others. It may not draw other numbers from a
    known seed, since how many it draws may depend on an example. A resumed pass uses no example
    again: its order is the package's own (arrays, `RecordFile`), or the rest of the pass is given
    up. Batches need not be secret.
    """

    num_examples: int
    batch_size: int
    passes: int = 1

    def __post_init__(self) -> None:
        for name in ("num_examples", "batch_size", "passes"):
            self._set(name, validate.positive_integer)

    @property
    def steps(self) -> int:  # type: ignore[override]
        """passes · ⌈N / batch_size⌉."""
        return self.passes * self.steps_per_pass

    @property
    def steps_per_pass(self) -> int:
        """⌈N / batch_size⌉."""
        return math.ceil(self.num_examples / self.batch_size)

    @property
    def expected_batch_size(self) -> float:  # type: ignore[override]
        """The batch size, also for a smaller last batch."""
        return float(self.batch_size)

    @property
    def batch_capacity(self) -> int:
        """The batch size."""
        return self.batch_size

    @property
    def neighbouring(self) -> str:
        """Zero-out, since removing an example would move all that follow it."""
        return "one has an example where the other has padding in the same place (zero-out)"

    @property
    def description(self) -> str:
        """Two lines for the statement."""
        return (
            f"The stream has {self.num_examples} examples in batches of {self.batch_size}, each "
            f"example at most once in each of {self.passes} passes.\n"
            "A pass that has begun counts as a whole. There is no amplification by sampling."
        )

    def event(self, mechanism: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """One run of `mechanism` for each pass that has begun: an example is in one batch of it."""
        return dp_accounting.SelfComposedDpEvent(mechanism, self.participations(steps))

    def participations(self, steps: int) -> int:
        """The passes that have begun."""
        return math.ceil(steps / self.steps_per_pass)

    def resumed_at(self, source: Any, spent: int) -> int:
        """`spent` if that is the end of a pass, or if examples are read by their index.

        For a `tf.data.Dataset` it is the beginning of the next pass, and a warning says so: read
        again, the dataset may have another order, and the rest of the pass could repeat examples.

        Raises:
            PrivacyError: No whole pass is left.
        """
        passes_begun = math.ceil(spent / self.steps_per_pass)
        first = passes_begun * self.steps_per_pass
        if first == spent or not isinstance(source, tf.data.Dataset):
            return spent
        why = (
            f"a tf.data.Dataset that is read again may have another order, and the rest of pass "
            f"{passes_begun} of {self.passes} could repeat examples. Arrays and a "
            "dp_sparse.RecordFile can continue within a pass; a dataset only after whole passes "
            f"of {self.steps_per_pass} steps."
        )
        if passes_begun == self.passes:
            raise PrivacyError(
                f"Expected a whole pass to continue with, but after {spent} of {self.steps} "
                f"no pass is left: {why}"
            )
        warnings.warn(
            f"Training continues at step {first}; steps {spent} to {first - 1} of {self.steps} are "
            f"given up, and count as spent: {why}",
            stacklevel=3,
        )
        return first

    def batches(
        self, source: Any, *, first_step: int = 0, augment: Augment | None = None
    ) -> tf.data.Dataset:
        """The run's batches from `first_step` on, each `[batch_size, ...]`.

        Args:
            source: `(x, y)` or `(x, y, sample_weight)` arrays or a `RecordFile`, in the same order
                each time; or a `tf.data.Dataset` of single examples. Each pass reads it once, so it
                must give each of `num_examples` examples once and then end.
            first_step: Where a resumed run continues: `model.optimizer.steps_spent`. With a dataset
                it continues with the next whole pass, and the rest of the last one counts as spent.
            augment: Changes each example at random, as in `PoissonSampling.batches`.

        Raises:
            ValueError: The data source does not hold `num_examples` examples, or holds ragged or
                sparse tensors, or `first_step` is outside the run.
            PrivacyError: No whole pass of a dataset is left, or a dataset or `augment` draws random
                numbers that can be predicted; or, while iterating, a pass has more or fewer
                examples than `num_examples`, or a source gives an example another row in another
                batch.
        """
        if not 0 <= first_step < self.steps:
            raise ValueError(
                f"Expected 0 <= first_step < {self.steps}, got first_step={first_step}: after "
                f"{self.steps} steps the plan has none left."
            )
        first_step = self.resumed_at(source, first_step)
        return augmented(self._run(source, first_step, (0, self.batch_size)), augment)

    def batches_of(
        self,
        source: Any,
        part: BatchPart,
        *,
        first_step: int,
        class_weight: dict[int, float] | None = None,
    ) -> tf.data.Dataset:
        """One worker's part of the run's batches, from a step that `resumed_at` gave.

        Args: as `batches`, without class weights; for several workers, no dataset.
        """
        if class_weight is not None:
            raise ValueError(
                f"Expected no class_weight with a stream, got {class_weight}: give each example "
                "its weight, (x, y, sample_weight)."
            )
        return self._run(source, first_step, (part.begin, part.end))

    def _run(self, source: Any, first_step: int, part: tuple[int, int]) -> tf.data.Dataset:
        if not isinstance(source, tf.data.Dataset):
            return self._of_indices(data_source.as_data_source(source), first_step, part)
        if part != (0, self.batch_size):
            raise PrivacyError(
                "Expected arrays or a dp_sparse.RecordFile as the stream of several workers, got "
                "a tf.data.Dataset: each worker would read it on its own, perhaps in another "
                "order, and examples would be used twice."
            )
        return dataset_passes.batches(source, self, first_step)

    def _of_indices(
        self, source: data_source.DataSource, first_step: int, part: tuple[int, int]
    ) -> tf.data.Dataset:
        if len(source) != self.num_examples:
            raise ValueError(
                f"Expected a data source of num_examples={self.num_examples} examples, got "
                f"{len(source)}: a pass has each example once."
            )

        def draws() -> Iterator[tuple[np.ndarray, marker.Marker]]:
            for index in range(first_step, self.steps):
                begin = index % self.steps_per_pass * self.batch_size
                end = min(begin + self.batch_size, self.num_examples)
                mark = marker.Marker(self.fingerprint, marker.OWN_ORDER, index)
                yield np.arange(begin, end), mark

        return gathered.dataset(source, draws, part, self.steps - first_step)
