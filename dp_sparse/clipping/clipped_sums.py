"""The sums of a batch, one type from the first product to the optimizer.

What adds up, over micro-batches and over replicas, is in `Amounts`; which variables and rows it
belongs to is in `ClippedSums`, and is the same for all parts of a batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from dp_sparse.clipping.uses import exact
from dp_sparse.core import replicas


class Amounts(NamedTuple):
    """What of the sums adds up; nested tensors, as loops, kernels and replicas pass them on.

    Attributes:
        dense: Of each dense variable Σ_i f_i g_i, of its shape.
        rows: Of each table the same on the rows of the step's choice, float64 `[rows, width]`.
        counts: int64 `[3]`: real examples, how many of them were clipped, how many zeroed because
            they were not finite. Not private.
        statistic: What the clipping style releases beside the sums, before its noise; float64.
    """

    dense: list[tf.Tensor]
    rows: list[tf.Tensor]
    counts: tf.Tensor
    statistic: tf.Tensor

    def plus(self, other: "Amounts") -> "Amounts":
        """Those of two parts of a batch together; sums in float64."""

        def added(own: list[tf.Tensor], others: list[tf.Tensor]) -> list[tf.Tensor]:
            return [exact(one) + exact(two) for one, two in zip(own, others, strict=True)]

        return Amounts(
            added(self.dense, other.dense),
            added(self.rows, other.rows),
            self.counts + other.counts,
            self.statistic + other.statistic,
        )


@dataclasses.dataclass(frozen=True)
class ClippedSums:
    """Sums of clipped per-example gradients, made by the private step and by nothing else.

    Attributes:
        dense: The dense variables.
        tables: The tables.
        row_ids: Of each table the rows of the step's choice, int64 `[rows]`.
        amounts: The sums themselves, in the order of these.
    """

    dense: Sequence[keras.Variable]
    tables: Sequence[keras.Variable]
    row_ids: Sequence[tf.Tensor]
    amounts: Amounts

    @property
    def slices(self) -> list[tf.IndexedSlices]:
        """Of each table its sum, with the rows of the choice."""
        pairs = zip(self.amounts.rows, self.row_ids, strict=True)
        return [tf.IndexedSlices(values, row_ids) for values, row_ids in pairs]

    def with_amounts(self, amounts: Amounts) -> "ClippedSums":
        """Other sums of the same variables and rows."""
        return dataclasses.replace(self, amounts=amounts)

    def over_replicas(self) -> "ClippedSums":
        """The sums of all replicas' parts of a batch, the same on each of them; in float64."""
        if replicas.count() == 1:
            return self
        total = replicas.merged(replicas.summed, tf.nest.map_structure(exact, self.amounts))
        return self.with_amounts(total._replace(counts=tf.cast(total.counts, tf.int64)))


def zero_sums(
    dense: Sequence[keras.Variable],
    tables: Sequence[keras.Variable],
    row_ids: Sequence[tf.Tensor],
) -> ClippedSums:
    """Those of no example at all."""
    amounts = Amounts(
        [tf.zeros(variable.shape, tf.float64) for variable in dense],
        [
            tf.zeros([tf.size(own), table.shape[1]], tf.float64)
            for own, table in zip(row_ids, tables, strict=True)
        ],
        tf.zeros([3], tf.int64),
        tf.zeros([], tf.float64),
    )
    return ClippedSums(dense, tables, row_ids, amounts)
