"""Streams: each example once a pass, in the dataset's order, with no amplification by sampling.

What a pipeline reads once (an online log, files too large to index) is trained on as it comes. One
example takes part in one batch a pass, so a run of k passes composes k Gaussian mechanisms.
O(batch) memory.
"""

import dataclasses
import math
from typing import Any

import dp_accounting
import tensorflow as tf

from dp_sparse import validate
from dp_sparse.errors import PrivacyError, require
from dp_sparse.sampling import marker
from dp_sparse.sampling.base import Sampling, Share
from dp_sparse.sampling.records import refuse_ragged, unpacked


@dataclasses.dataclass(frozen=True)
class StreamSampling(Sampling):
    """Fixed batches, each example in exactly one of them a pass.

    Attributes:
        num_examples: N, the examples of one pass, public.
        batch_size: Examples in a batch; the last one of a pass may be smaller and is padded.
        passes: How often the whole stream is read.

    ### Formal Guarantees
    Neighbouring datasets differ by zeroing out one example (it is replaced by padding of weight 0);
    removing one would move all that follow it. The order must not depend on the examples' values.
    No secrecy of the batches is assumed.
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
        return self.passes * self._steps_per_pass

    @property
    def _steps_per_pass(self) -> int:
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
    def ordered(self) -> bool:
        """A resumed run must go on where it stopped, or an example would be used twice."""
        return True

    @property
    def neighbouring(self) -> str:
        """Zero-out, since removal would shift the stream."""
        return "one has an example where the other has padding in the same place (zero-out)"

    @property
    def description(self) -> str:
        """One line for the statement."""
        return (
            f"stream of {self.num_examples} examples in batches of {self.batch_size}, each "
            f"example once in each of "
            f"{self.passes} passes, no amplification"
        )

    def event(self, mechanism: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """One run of `mechanism` for each pass begun: no example is in two batches of a pass."""
        return dp_accounting.SelfComposedDpEvent(mechanism, math.ceil(steps / self._steps_per_pass))

    def batches(self, source: tf.data.Dataset, *, first_step: int = 0) -> tf.data.Dataset:
        """The run's batches from `first_step` on, each `[batch_size, ...]`.

        Args:
            source: Dataset of single examples `(x, y)` or `(x, y, sample_weight)`; its first
                `num_examples` are one pass, so it must give each example once, and the same ones
                every time.
            first_step: Where a resumed run goes on: `model.optimizer.steps_spent`.

        Raises:
            ValueError: `source` is not a dataset, or one of ragged or sparse tensors, or
                `first_step` is outside the run.
            PrivacyError: While iterating, when a pass holds fewer examples than `num_examples`.
        """
        return self._run(source, first_step, marker.new_nonce(None)).prefetch(2)

    def batches_of(
        self,
        source: tf.data.Dataset,
        share: Share,
        *,
        first_step: int,
        class_weight: dict[int, float] | None = None,
    ) -> tf.data.Dataset:
        """One worker's rows of the run's batches; every worker reads the whole stream.

        Args: as `batches`; without class weights.
        """
        if class_weight is not None:
            raise ValueError(
                f"Expected no class_weight with a stream, got {class_weight}: give each example "
                "its weight, (x, y, sample_weight)."
            )

        def own(*batch: Any) -> Any:
            return tf.nest.map_structure(lambda leaf: leaf[share.begin : share.end], batch)

        return self._run(source, first_step, share.nonce).map(own).prefetch(2)

    def _run(self, source: tf.data.Dataset, first_step: int, nonce: int) -> tf.data.Dataset:
        if not isinstance(source, tf.data.Dataset):
            raise ValueError(
                f"Expected a tf.data.Dataset of single examples, got {type(source).__name__}."
            )
        refuse_ragged(source.element_spec)
        if not 0 <= first_step < self.steps:
            raise ValueError(
                f"Expected 0 <= first_step < {self.steps}, got first_step={first_step}."
            )
        one_pass = source.take(self.num_examples).map(_weighted).batch(self.batch_size)
        nothing = tf.data.Dataset.from_tensors(_empty_like(one_pass.element_spec)).repeat()
        one_pass = (
            one_pass.concatenate(nothing).take(self._steps_per_pass).enumerate().map(self._full)
        )
        run = one_pass.repeat(self.passes).enumerate().skip(first_step)
        run = run.map(lambda index, batch: self._marked(index, batch, nonce))
        return run.apply(tf.data.experimental.assert_cardinality(self.steps - first_step))

    def _full(self, index: tf.Tensor, batch: Any) -> Any:
        """Fails on a pass that ends early.

        Repeating it would use its examples more often than was paid for.
        """
        count = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
        expected = tf.minimum(
            tf.constant(self.batch_size, tf.int64), self.num_examples - index * self.batch_size
        )
        message = (
            f"Expected num_examples={self.num_examples} examples in each pass of the stream, "
            "but batch {} holds {}."
        )
        with tf.control_dependencies(
            [require(tf.equal(count, expected), PrivacyError, message, index, count)]
        ):
            return tf.nest.map_structure(tf.identity, batch)

    def _marked(self, index: tf.Tensor, batch: Any, nonce: int) -> Any:
        x, y, weights = batch
        count = tf.shape(tf.nest.flatten(x)[0])[0]

        def pad(leaf: tf.Tensor) -> tf.Tensor:
            widths = [[0, self.batch_size - count]] + [[0, 0]] * (leaf.shape.rank - 1)
            return tf.ensure_shape(tf.pad(leaf, widths), [self.batch_size, *leaf.shape[1:]])

        checks = [_weight_check(weight, index) for weight in tf.nest.flatten(weights)]
        with tf.control_dependencies(checks):
            x, y, weights = tf.nest.map_structure(pad, (x, y, weights))
        present = tf.cast(tf.range(self.batch_size) < count, tf.float32)
        mark = tf.constant(marker.Marker(self.fingerprint, nonce, 0).rows(self.batch_size))
        mark += tf.stack([[0, 0, index, 0]])
        return x, y, {"sample_weight": weights, "present": present, "marker": mark}


def _weight_check(weights: tf.Tensor, index: tf.Tensor) -> tf.Operation:
    bad = tf.boolean_mask(weights, ~(tf.math.is_finite(weights) & (weights >= 0)))
    message = "Expected sample weights >= 0 and finite, got {} in batch {}."
    return require(tf.equal(tf.size(bad), 0), ValueError, message, bad[:1], index)


def _weighted(*example: Any) -> tuple[Any, Any, Any]:
    x, y, weight = unpacked(example)
    weight = tf.constant(1.0) if weight is None else weight
    return x, y, tf.nest.map_structure(lambda value: tf.cast(value, tf.float32), weight)


def _empty_like(spec: Any) -> Any:
    return tf.nest.map_structure(lambda s: tf.zeros([0, *s.shape[1:]], s.dtype), spec)
