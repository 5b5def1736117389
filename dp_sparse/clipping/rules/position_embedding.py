"""keras-hub's PositionEmbedding: rows of W by position, the same rows for every example.

An example's gradient is its cotangent, at its positions. Since all examples use all rows, W is a
dense variable, and no table for a selection of rows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from dp_sparse.clipping.rules.embedding import in_range
from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Use, numerics
from dp_sparse.core import UnsupportedLayerError


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive rows of W `[rows, width]`, each added once to every example.

    Attributes:
        gradients: Per-example gradients of these rows, float32 `[batch, span, width]`.
        start: The first of them, an int32 scalar.
        num_rows: Rows of W.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("gradients",)
    holds_gradients: ClassVar[bool] = True
    gradients: tf.Tensor
    start: tf.Tensor
    num_rows: int

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖²."""
        return numerics.squares(self.gradients)

    def joined_with(self, others: Sequence["Span"]) -> "Span":
        """All calls of the layer as one use, of all rows."""
        whole = tf.add_n([part._placed(part.gradients) for part in (self, *others)])
        return Span(whole, tf.constant(0), self.num_rows)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, float64 `[rows, width]`."""
        total = tf.tensordot(numerics.exact(factors), numerics.exact(self.gradients), 1)
        return self._placed(total)

    def _placed(self, values: tf.Tensor) -> tf.Tensor:
        """`[..., span, width]` as `[..., rows, width]`, with zeros at the other rows."""
        others = self.num_rows - self.start - tf.shape(values)[-2]
        around = [[0, 0]] * (values.shape.rank - 2) + [[self.start, others], [0, 0]]
        shape = [*values.shape[:-2], self.num_rows, values.shape[-1]]
        return tf.ensure_shape(tf.pad(values, around), shape)


def call_position_embedding(
    layer: Any,
    call: Callable[..., Any],
    tap: Tap,
    inputs: tf.Tensor,
    start_index: Any = 0,
    positions: Any = None,
) -> tf.Tensor:
    """Runs the layer's own call and records the rows that it used.

    Args:
        layer: The PositionEmbedding.
        call: Its own call.
        tap: Records the use of W.
        inputs: `[batch, ..., sequence, width]`, of which only the shape counts.
        start_index: The position of the first element, an integer scalar.
        positions: Instead, the position of each element: integer `[sequence]`, or like `inputs`
            without the width. A position may occur more than once in an example.

    Raises:
        UnsupportedLayerError: `inputs` without an axis of examples, or `positions` of another
            shape.
    """
    positions = _checked_positions(layer, inputs, positions)
    outputs = call(inputs, start_index=start_index, positions=positions)
    num_rows = layer.sequence_length

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        [dz] = cotangents
        if positions is not None:
            span = Span(_at_positions(dz, positions, num_rows), tf.constant(0), num_rows)
        else:
            middle = list(range(1, dz.shape.rank - 2))
            span = Span(tf.reduce_sum(dz, middle), tf.cast(start_index, tf.int32), num_rows)
        return [(layer.position_embeddings, span)]

    tap.watch([outputs], uses_of)
    return outputs


def _checked_positions(layer: Any, inputs: tf.Tensor, positions: Any) -> tf.Tensor | None:
    given = None if positions is None else tf.cast(positions, tf.int64)
    rank = inputs.shape.rank
    if rank < 3 or (given is not None and given.shape.rank not in (1, rank - 1)):
        raise UnsupportedLayerError(
            f"{layer.path} (PositionEmbedding): inputs {inputs.shape} with positions "
            f"{getattr(given, 'shape', None)} may mix examples. Give inputs [batch, sequence, "
            "width], and positions [sequence], [batch, sequence] or none."
        )
    if given is None:
        return None
    fix = "Raise sequence_length, or cut the sequences."
    return in_range("positions", given, layer.sequence_length, layer.path, fix)


def _at_positions(cotangents: tf.Tensor, positions: tf.Tensor, num_rows: int) -> tf.Tensor:
    """The cotangents of each position of an example, summed: float32 `[batch, rows, width]`."""
    batch, width = tf.shape(cotangents, tf.int64)[0], cotangents.shape[-1]
    ids = tf.broadcast_to(positions, tf.shape(cotangents)[:-1])
    rows = ids + num_rows * numerics.expanded(tf.range(batch), ids)
    sums = tf.math.unsorted_segment_sum(
        numerics.flat(cotangents), tf.reshape(rows, [-1]), batch * num_rows
    )
    return tf.reshape(sums, [-1, num_rows, width])
