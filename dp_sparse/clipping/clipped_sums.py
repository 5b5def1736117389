"""The sums of a batch, one type from the first product to the optimizer.

What adds up, over micro-batches and over replicas, is in `Amounts`; which variables and rows it
belongs to is in `ClippedSums`, and is the same for all parts of a batch.

From gradient terms to clipped sums: squared norms → clip factors → Σ_i f_i g_i.

### Formal Guarantees
With g_i the gradient of every trained variable together, rows outside the step's choice zeroed
first, and the factors of a clipping style, adding, removing or zeroing out one example moves the
sums by at most C in L2. An example whose loss or gradient is not finite contributes exact zeros,
and so does padding.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from dp_sparse.clipping import styles
from dp_sparse.clipping.gradient_terms import GradientTerm, Rows, exact, expanded, floats_of
from dp_sparse.clipping.styles import ClipNorm, ClippingStyle, FlatClipping
from dp_sparse.core import rare_branch, replicas

FLAT = FlatClipping()


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
        to_remember: As of the step's choice.
    """

    dense: Sequence[keras.Variable]
    tables: Sequence[keras.Variable]
    row_ids: Sequence[tf.Tensor]
    amounts: Amounts
    to_remember: tuple[tf.Tensor, ...] = ()

    @property
    def slices(self) -> list[tf.IndexedSlices]:
        """The sum of each table, with the chosen rows."""
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
    to_remember: tuple[tf.Tensor, ...] = (),
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
    return ClippedSums(dense, tables, row_ids, amounts, to_remember)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Each example's gradient with the factor it counts with; what is known of it is not private.

    Attributes:
        terms: Each variable's term, zeroed where it is not finite, and its factors, `[batch]`.
        squared_norms: ‖g_i‖², float32 `[batch]`.
        clipped: bool `[batch]`: true where some factor is below 1.
        finite: bool `[batch]`: false for examples that were zeroed.
    """

    terms: list[tuple[keras.Variable, GradientTerm, tf.Tensor]]
    squared_norms: tf.Tensor
    clipped: tf.Tensor
    finite: tf.Tensor

    def dense_sums(self) -> dict[int, tf.Tensor]:
        """Σ_i f_i g_i of each variable that is no table, by its id."""
        dense = [each for each in self.terms if not isinstance(each[1], Rows)]
        return {id(variable): term.clipped_sum(f) for variable, term, f in dense}  # type: ignore[attr-defined]

    def row_sums(self, num_rows: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """The same of each table on the rows of the step's choice, float64 `[rows, width]`.

        Args:
            num_rows: By the id of each table, how many rows the step chose.
        """
        lookups = [each for each in self.terms if isinstance(each[1], Rows)]
        return {id(v): term.clipped_sum(f, num_rows[id(v)]) for v, term, f in lookups}  # type: ignore[attr-defined]

    def counts(self, real: tf.Tensor, dtype: tf.DType = tf.int64) -> tf.Tensor:
        """`Amounts.counts`, `[3]` of `dtype`, of the examples for which `real` is not 0."""
        examples = real > 0
        kinds = examples, examples & self.finite & self.clipped, examples & ~self.finite
        return tf.reduce_sum(tf.cast(tf.stack(kinds), dtype), axis=1)


def scaled(
    terms: Sequence[tuple[keras.Variable, GradientTerm]],
    clip_norm: ClipNorm,
    losses: tf.Tensor,
    real: tf.Tensor,
    style: ClippingStyle = FLAT,
) -> Scaled:
    """Finds the factors that clip each example's gradient to `clip_norm`.

    Args:
        terms: Each variable's joined term; tables already restricted to the step's rows.
        clip_norm: C > 0, a Python number or a scalar.
        losses: Per-example losses `[batch]`, to find those that are not finite.
        real: float32 `[batch]`, 0 for padding and examples of weight 0.
        style: How the factors come from the norms.
    """
    variables, squared = [v for v, _ in terms], [term.squared_norms() for _, term in terms]
    with tf.control_dependencies([losses]):  # which follow the check of shapes
        total = styles.total(squared)
    finite = tf.math.is_finite(total) & tf.math.is_finite(losses)
    sizes = tf.maximum(tf.sqrt(total) / 1e17, tf.abs(losses) / 1e30)
    kept = tf.cast(real > 0, tf.float32) * _overflow_ramp(sizes)
    factors = style.factors(variables, squared, clip_norm)
    clipped = tf.reduce_any(tf.stack(list({id(f): f < 1.0 for f in factors}.values())), axis=0)
    counted = {id(f): tf.where(finite, f * kept, 0.0) for f in factors}
    found = [
        (variable, term, counted[id(factor)])
        for (variable, term), factor in zip(_sanitised(terms, finite), factors, strict=True)
    ]
    return Scaled(found, total, clipped, finite)


def _overflow_ramp(sizes: tf.Tensor) -> tf.Tensor:
    """1 up to 1, 0 from 2 on.

    Before float32 overflows, so that a last bit cannot switch an example on or off: it may depend
    on the rest of the batch.
    """
    return tf.clip_by_value(2.0 - sizes, 0.0, 1.0)


def _sanitised(
    terms: Sequence[tuple[keras.Variable, GradientTerm]], finite: tf.Tensor
) -> list[tuple[keras.Variable, GradientTerm]]:
    """The terms with the records of non-finite examples zeroed, since 0 · NaN is NaN.

    Free when there is none.
    """
    structures = [floats_of(term) for _, term in terms]
    once = {
        id(tensor): tensor for tensor in tf.nest.flatten(structures)
    }  # what terms share stays so

    def zeroed() -> list[tf.Tensor]:
        return [tf.where(expanded(finite, tensor), tensor, 0.0) for tensor in once.values()]

    clean = tf.cond(
        tf.reduce_all(finite), lambda: [tf.identity(t) for t in once.values()], rare_branch(zeroed)
    )
    cleaned = dict(zip(once, clean, strict=True))
    fields = tf.nest.map_structure(lambda tensor: cleaned[id(tensor)], structures)
    return [
        (variable, dataclasses.replace(term, **own))  # type: ignore[type-var]
        for (variable, term), own in zip(terms, fields, strict=True)
    ]
