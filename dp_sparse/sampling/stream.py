"""Streams: each example once a pass, in the dataset's order, with no amplification by sampling.

For data that a pipeline reads once, such as an online log or files too large to index. An example
is in one batch of each pass, so a run of k passes composes k Gaussian mechanisms. O(batch) memory.

A `tf.data.Dataset` may have another order each time that it is read.

A pass reads the dataset once, and the dataset must end with its last example. The marker of each
batch names the iterator that made it, so parts of two readings cannot be joined to one pass.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, require, validate
from dp_sparse.sampling import base, data_source, held_out, input_guard
from dp_sparse.sampling.augmentation import Augment, augmented
from dp_sparse.sampling.base import BatchPart, Sampling
from dp_sparse.sampling.batch import OWN_ORDER, Marker, is_sampled, new_nonce, weight_check
from dp_sparse.sampling.data_source import batch_hint, refuse_ragged, unpacked


def batches_of_passes(
    source: tf.data.Dataset, sampling: Sampling, first_step: int
) -> tf.data.Dataset:
    """The batches from `first_step` on, each `[capacity, ...]`; `first_step` begins a pass.

    Raises:
        ValueError: The examples have no fixed shape, or their number is not the sampler's.
        PrivacyError: While iterating, when a pass has more or fewer examples than expected.
    """
    _check_dataset(source, sampling.num_examples)
    input_guard.check_source(source)
    assert sampling.steps_per_pass is not None
    size, steps = sampling.batch_capacity, sampling.steps - first_step
    one_pass = source.take(sampling.num_examples + 1).map(_weighted).batch(size)
    nothing = _empty_like(one_pass.element_spec)
    endless = one_pass.concatenate(tf.data.Dataset.from_tensors(nothing).repeat())
    pairs = _with_next_size(endless.take(sampling.steps_per_pass + 1), nothing)
    checked = pairs.enumerate().map(lambda *args: _whole(sampling, batch_hint(source), *args))
    run = checked.repeat(steps // sampling.steps_per_pass).enumerate(first_step)
    run = tf.data.Dataset.zip(run, _nonce_of_iterator())
    run = run.map(lambda batch, nonce: _marked(sampling, batch[0], batch[1], nonce))
    run = run.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
    return held_out.remember(input_guard.own(run), source)


def _check_dataset(source: tf.data.Dataset, num_examples: int) -> None:
    if is_sampled(source.element_spec):
        raise ValueError(
            "Expected examples, got batches of a sampler: pass what sampling.batches(...) was "
            "given."
        )
    refuse_ragged(source.element_spec)
    cardinality = int(source.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"Expected a data source that ends after num_examples={num_examples} examples, got one "
            "without end: it would give examples more than once in a pass. Leave repeat() out; "
            "passes= says how often the dataset is read."
        )
    if cardinality not in (tf.data.UNKNOWN_CARDINALITY, num_examples):
        raise ValueError(
            f"Expected a data source of num_examples={num_examples} examples, got {cardinality}: a "
            "pass has each example once. Give the true number, or cut the dataset by take(...)."
            f"{batch_hint(source)}"
        )
    for leaf in tf.nest.flatten(source.element_spec):
        if not leaf.shape.is_fully_defined():
            raise ValueError(
                f"Expected examples of one known shape, got a part of shape {leaf.shape}: pad it, "
                f"and say its shape by tf.ensure_shape.{batch_hint(source)}"
            )


def _with_next_size(dataset: tf.data.Dataset, nothing: Any) -> tf.data.Dataset:
    """Each batch but the last one, with the size of the batch that follows it."""

    def step(before: Any, batch: Any) -> Any:
        return batch, (before, _batch_size(batch))

    return dataset.scan(nothing, step).skip(1)


def _whole(sampling: Sampling, hint: str, index: tf.Tensor, pair: Any) -> Any:
    """The batch; fails if a pass ends early, or does not end.

    Repeating such a pass, or reading on, would use examples more often than the plan pays for.
    """
    batch, next_size = pair
    assert sampling.steps_per_pass is not None
    total, capacity = sampling.num_examples, tf.constant(sampling.batch_capacity, tf.int64)
    expected = tf.minimum(capacity, total - index * capacity)
    last = tf.equal(index, sampling.steps_per_pass - 1)
    size = _batch_size(batch) + tf.where(last, next_size, 0)
    message = (
        f"Expected num_examples={total} examples in each pass of the stream, but batch {{}} "
        f"holds {{}}.{hint}"
    )
    longer = (
        f"Expected the stream to end after num_examples={total} examples, got more: a dataset that "
        "repeats examples would use them more often than the plan pays for. If it gives each once, "
        f"cut it by take(...).{hint}"
    )
    checks = [
        require(size <= expected, PrivacyError, longer),
        require(size >= expected, PrivacyError, message, index, size),
    ]
    with tf.control_dependencies(checks):
        return tf.nest.map_structure(tf.identity, batch)


def _nonce_of_iterator() -> tf.data.Dataset:
    """The same number without end; each iterator has a number of its own."""

    def draw() -> Iterator[int]:
        yield new_nonce(None)

    drawn = tf.data.Dataset.from_generator(draw, output_signature=tf.TensorSpec([], tf.int64))
    return drawn.flat_map(lambda nonce: tf.data.Dataset.from_tensors(nonce).repeat())


def _marked(sampling: Sampling, index: tf.Tensor, batch: Any, nonce: tf.Tensor) -> Any:
    x, y, weights = batch
    count, capacity = tf.cast(_batch_size(batch), tf.int32), sampling.batch_capacity

    def pad(leaf: tf.Tensor) -> tf.Tensor:
        widths = [[0, capacity - count]] + [[0, 0]] * (leaf.shape.rank - 1)
        return tf.ensure_shape(tf.pad(leaf, widths), [capacity, *leaf.shape[1:]])

    checks = [weight_check(weight, index) for weight in tf.nest.flatten(weights)]
    with tf.control_dependencies(checks):
        x, y, weights = tf.nest.map_structure(pad, (x, y, weights))
    present = tf.cast(tf.range(capacity) < count, tf.float32)
    numbers = tf.constant(Marker(sampling.fingerprint, 0, 0).of_examples(capacity))
    mark = numbers + tf.stack([[0, nonce, index, 0]])
    return x, y, {"sample_weight": weights, "present": present, "marker": mark}


def _batch_size(batch: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]


def _weighted(*example: Any) -> tuple[Any, Any, Any]:
    x, y, weight = unpacked(example)
    weight = tf.constant(1.0) if weight is None else weight
    return x, y, tf.nest.map_structure(lambda value: tf.cast(value, tf.float32), weight)


def _empty_like(spec: Any) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros([0, *s.shape[1:]], s.dtype), spec)


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
    def steps_per_round(self) -> int:
        """Those of a pass."""
        return self.steps_per_pass

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
        return batches_of_passes(source, self, first_step)

    def _of_indices(
        self, source: data_source.DataSource, first_step: int, part: tuple[int, int]
    ) -> tf.data.Dataset:
        if len(source) != self.num_examples:
            raise ValueError(
                f"Expected a data source of num_examples={self.num_examples} examples, got "
                f"{len(source)}: a pass has each example once."
            )

        def draws() -> Iterator[tuple[np.ndarray, Marker]]:
            for index in range(first_step, self.steps):
                begin = index % self.steps_per_pass * self.batch_size
                end = min(begin + self.batch_size, self.num_examples)
                mark = Marker(self.fingerprint, OWN_ORDER, index)
                yield np.arange(begin, end), mark

        return base.gathered_batches(source, draws, part, self.steps - first_step)
