"""From uses to clipped sums: squared norms → clip factors → Σ_i f_i g_i, all from the same records.

### Formal Guarantees
With g_i the gradient of every trained variable together, rows outside the step's choice zeroed
first, and the factors of a clipping style, adding, removing or zeroing out one example moves the
sums by at most C in L2. An example whose loss or gradient is not finite contributes exact zeros,
and so does padding.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from dp_sparse.clipping import styles
from dp_sparse.clipping.styles import ClipNorm, ClippingStyle, FlatClipping
from dp_sparse.clipping.uses import Rows, Use, expanded
from dp_sparse.core import seldom

FLAT = FlatClipping()


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Each example's gradient with the factor it counts with; what is known of it is not private.

    Attributes:
        uses: Each variable's use, zeroed where it is not finite, and its factors, `[batch]`.
        squared_norms: ‖g_i‖², float32 `[batch]`.
        clipped: bool `[batch]`: true where some factor is below 1.
        finite: bool `[batch]`: false for examples that were zeroed.
    """

    uses: list[tuple[keras.Variable, Use, tf.Tensor]]
    squared_norms: tf.Tensor
    clipped: tf.Tensor
    finite: tf.Tensor

    def dense_sums(self) -> dict[int, tf.Tensor]:
        """Σ_i f_i g_i of each variable that is no table, by its id."""
        dense = [each for each in self.uses if not isinstance(each[1], Rows)]
        return {id(variable): use.clipped_sum(f) for variable, use, f in dense}  # type: ignore[attr-defined]

    def row_sums(self, num_rows: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """The same of each table on the rows of the step's choice, float64 `[rows, width]`.

        Args:
            num_rows: By the id of each table, how many rows the step chose.
        """
        lookups = [each for each in self.uses if isinstance(each[1], Rows)]
        return {id(v): use.clipped_sum(f, num_rows[id(v)]) for v, use, f in lookups}  # type: ignore[attr-defined]

    def counts(self, real: tf.Tensor, dtype: tf.DType = tf.int64) -> tf.Tensor:
        """`Amounts.counts`, `[3]` of `dtype`, of the examples for which `real` is not 0."""
        examples = real > 0
        kinds = examples, examples & self.finite & self.clipped, examples & ~self.finite
        return tf.reduce_sum(tf.cast(tf.stack(kinds), dtype), axis=1)


def scaled(
    uses: Sequence[tuple[keras.Variable, Use]],
    clip_norm: ClipNorm,
    losses: tf.Tensor,
    real: tf.Tensor,
    style: ClippingStyle = FLAT,
) -> Scaled:
    """Finds the factors that clip each example's gradient to `clip_norm`.

    Args:
        uses: Each variable's joined use; tables already restricted to the step's rows.
        clip_norm: C > 0, a Python number or a scalar.
        losses: Per-example losses `[batch]`, to find those that are not finite.
        real: float32 `[batch]`, 0 for padding and examples of weight 0.
        style: How the factors come from the norms.
    """
    variables, squared = [v for v, _ in uses], [use.squared_norms() for _, use in uses]
    with tf.control_dependencies([losses]):  # which follow the check of shapes
        total = styles.total(squared)
    finite = tf.math.is_finite(total) & tf.math.is_finite(losses)
    sizes = tf.maximum(tf.sqrt(total) / 1e17, tf.abs(losses) / 1e30)
    kept = tf.cast(real > 0, tf.float32) * _faded(sizes)
    factors = style.factors(variables, squared, clip_norm)
    clipped = tf.reduce_any(tf.stack(list({id(f): f < 1.0 for f in factors}.values())), axis=0)
    counted = {id(f): tf.where(finite, f * kept, 0.0) for f in factors}
    found = [
        (variable, use, counted[id(factor)])
        for (variable, use), factor in zip(_sanitised(uses, finite), factors, strict=True)
    ]
    return Scaled(found, total, clipped, finite)


def _faded(sizes: tf.Tensor) -> tf.Tensor:
    """1 up to 1, 0 from 2 on.

    Before float32 overflows, so that a last bit cannot switch an example on or off: it may depend
    on the rest of the batch.
    """
    return tf.clip_by_value(2.0 - sizes, 0.0, 1.0)


def _sanitised(
    uses: Sequence[tuple[keras.Variable, Use]], finite: tf.Tensor
) -> list[tuple[keras.Variable, Use]]:
    """The uses with the records of non-finite examples zeroed, since 0 · NaN is NaN.

    Free when there is none.
    """
    structures = [{name: getattr(use, name) for name in use.float_fields} for _, use in uses]
    once = {
        id(tensor): tensor for tensor in tf.nest.flatten(structures)
    }  # what uses share stays so

    def zeroed() -> list[tf.Tensor]:
        return [tf.where(expanded(finite, tensor), tensor, 0.0) for tensor in once.values()]

    clean = tf.cond(
        tf.reduce_all(finite), lambda: [tf.identity(t) for t in once.values()], seldom(zeroed)
    )
    cleaned = dict(zip(once, clean, strict=True))
    fields = tf.nest.map_structure(lambda tensor: cleaned[id(tensor)], structures)
    return [
        (variable, dataclasses.replace(use, **own))  # type: ignore[type-var]
        for (variable, use), own in zip(uses, fields, strict=True)
    ]
