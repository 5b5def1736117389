"""From uses to clipped sums: squared norms → clip factors → Σ_i f_i g_i, all from the same records.

### Formal Guarantees
With factors f_i = min(1, C/‖g_i‖) and g_i the gradient of every trained variable together, rows
outside the step's choice zeroed first, adding, removing or zeroing out one example moves the sums
by at most C in L2. An example whose loss or gradient is not finite contributes exact zeros, and so
does padding.
"""

import dataclasses

import keras
import tensorflow as tf

from dp_sparse.clipping.uses import Rows, Use


@dataclasses.dataclass(frozen=True)
class ClippedSums:
    """Sums of clipped per-example gradients, and what is known of the clipping (not private).

    Attributes:
        dense: Each dense variable with its sum.
        tables: Each table with its sum on the step's rows, float32 `[rows, width]`.
        squared_norms: ‖g_i‖², float32 `[batch]`.
        finite: bool `[batch]`: false for examples that were zeroed.
    """

    dense: list[tuple[keras.Variable, tf.Tensor]]
    tables: list[tuple[keras.Variable, tf.Tensor]]
    squared_norms: tf.Tensor
    finite: tf.Tensor


def clip(
    uses: list[tuple[keras.Variable, Use]],
    num_slots: dict[int, tf.Tensor],
    clip_norm: float,
    losses: tf.Tensor,
    present: tf.Tensor,
) -> ClippedSums:
    """Clips each example's gradient to `clip_norm` and sums.

    Args:
        uses: Each variable's joined use; tables already restricted to the step's rows.
        num_slots: For the id of each table variable, how many rows the step chose.
        clip_norm: C > 0.
        losses: Per-example losses `[batch]`, to find those that are not finite.
        present: float32 `[batch]`, 0 for padding.
    """
    squared = tf.add_n([use.squared_norms() for _, use in uses])
    finite = tf.math.is_finite(squared) & tf.math.is_finite(losses)
    factors = tf.minimum(1.0, clip_norm * tf.math.rsqrt(tf.maximum(squared, 1e-30)))
    factors = tf.where(finite, factors * tf.cast(present > 0, tf.float32), 0.0)
    uses = _sanitised(uses, finite)
    tables = [(v, u.clipped_sum(factors, num_slots[id(v)])) for v, u in uses if isinstance(u, Rows)]
    dense = [(v, u.clipped_sum(factors)) for v, u in uses if not isinstance(u, Rows)]  # type: ignore[attr-defined]
    return ClippedSums(dense, tables, squared, finite)


def _sanitised(
    uses: list[tuple[keras.Variable, Use]], finite: tf.Tensor
) -> list[tuple[keras.Variable, Use]]:
    """The uses with the records of non-finite examples zeroed, since 0 · NaN is NaN.

    Free when there is none.
    """
    structures = [{name: getattr(use, name) for name in use.float_fields} for _, use in uses]
    once = {
        id(tensor): tensor for tensor in tf.nest.flatten(structures)
    }  # what uses share stays so

    def zeroed() -> list[tf.Tensor]:
        return [tf.where(_expanded(finite, tensor), tensor, 0.0) for tensor in once.values()]

    clean = tf.cond(tf.reduce_all(finite), lambda: [tf.identity(t) for t in once.values()], zeroed)
    cleaned = dict(zip(once, clean, strict=True))
    fields = tf.nest.map_structure(lambda tensor: cleaned[id(tensor)], structures)
    return [
        (variable, dataclasses.replace(use, **own))  # type: ignore[type-var]
        for (variable, use), own in zip(uses, fields, strict=True)
    ]


def _expanded(finite: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(finite, [-1] + [1] * (tensor.shape.rank - 1))
