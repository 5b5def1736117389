"""keras-rs' EmbedReduce: looked-up rows r_l, reduced to Σ w_l·r_l over a combiner's divisor.

The rows are recorded before they are reduced, so the table is used through lookups like any other:
the tape gives the cotangent of each row, w_l · dz / divisor, and passes through the weights to
whatever computed them.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.rules.embedding import looked_up
from dp_sparse.clipping.tap import Tap
from dp_sparse.core import UnsupportedLayerError


def call_embed_reduce(
    layer: Any,
    call: Callable[..., Any],
    tap: Tap,
    inputs: tf.Tensor,
    weights: tf.Tensor | None = None,
) -> tf.Tensor:
    """Gathers the rows of `inputs`, records them as lookups, and reduces them as keras-rs does.

    A lookup of weight 0 is padding: it does not train its row, and does not count as a lookup.
    `mask_zero` takes no lookup out of the reduction; row 0 is trained like the others.

    Args:
        layer: The EmbedReduce.
        call: Its own call, which would copy the table.
        tap: Records the lookups.
        inputs: Ids, integer `[batch]` or `[batch, ..., lookups]`; dense.
        weights: Of the shape of the ids, or of its first axes, or with an axis for the width;
            dense. With ids `[batch]` only the combiner "sum" uses them.

    Returns:
        `[batch, width]`, or `[batch, ..., width]` without the axis of lookups.

    Raises:
        UnsupportedLayerError: Sparse or ragged ids or weights.
        ValueError: Weights that do not fit the ids.
    """
    del call
    _refuse_sparse(layer, inputs, weights)
    row_ids = tf.cast(inputs, tf.int64)
    factors = _factors(layer, row_ids, weights)
    used = tf.reduce_any(tf.not_equal(factors, 0), axis=-1)
    rows = looked_up(layer, tap, row_ids, tf.broadcast_to(used, tf.shape(row_ids)))
    weighted = tf.cast(rows, factors.dtype) * factors
    return weighted if inputs.shape.rank == 1 else _reduced(weighted, factors, layer.combiner)


def _factors(layer: Any, row_ids: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    """What each row is multiplied by, with as many axes as the rows."""
    rank = row_ids.shape.rank + 1
    dtype = layer.compute_dtype
    if weights is not None:
        _refuse_shape(layer, row_ids, weights)
        dtype = keras.backend.result_type(dtype, weights.dtype)
    if weights is None or (rank == 2 and layer.combiner != "sum"):
        weights = tf.ones_like(row_ids)
    missing = [1] * (rank - weights.shape.rank)
    return tf.reshape(tf.cast(weights, dtype), tf.concat([tf.shape(weights), missing], 0))


def _reduced(weighted: tf.Tensor, factors: tf.Tensor, combiner: str) -> tf.Tensor:
    """Sum, mean or sqrtn over the axis of lookups, the last but one; 0 if the divisor is 0."""
    total = tf.reduce_sum(weighted, axis=-2)
    if combiner == "sum":
        return total
    if combiner == "mean":
        return tf.math.divide_no_nan(total, tf.reduce_sum(factors, axis=-2))
    return tf.math.divide_no_nan(total, tf.sqrt(tf.reduce_sum(tf.square(factors), axis=-2)))


def _refuse_sparse(layer: Any, *given: tf.Tensor | None) -> None:
    if any(isinstance(value, tf.SparseTensor | tf.RaggedTensor) for value in given):
        raise UnsupportedLayerError(
            f"{layer.path} (EmbedReduce): sparse and ragged ids and weights have no clipping rule. "
            "Pad the ids to a dense tensor [batch, lookups], and give weights with 0 at the "
            "padding."
        )


def _refuse_shape(layer: Any, row_ids: tf.Tensor, weights: tf.Tensor) -> None:
    rows = [*row_ids.shape, layer.output_dim]
    if not weights.shape.is_compatible_with(rows[: weights.shape.rank]):
        raise ValueError(
            f"Expected weights of the shape of the ids {row_ids.shape} at layer {layer.path}, got "
            f"{weights.shape}."
        )
