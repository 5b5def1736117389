"""Embedding: rows gathered from the resource variable itself, so the table is never copied.

Keras' own call reads the whole table before it gathers, which copies it after each scatter (330 ms
at 10M rows).
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Rows, Use
from dp_sparse.errors import BadExampleError, require


def call_embedding(
    layer: keras.layers.Embedding, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Gathers the rows of `inputs`, integer `[batch, ...]`, and records them as lookups.

    A lookup of id 0 under `mask_zero` is masked: it does not train its row.
    """
    del call
    table = layer.embeddings
    row_ids = _checked(tf.cast(inputs, tf.int64), layer)
    rows = tf.gather(table.value, row_ids)

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        batch = tf.shape(row_ids)[0]
        ids = tf.reshape(row_ids, [batch, _lookups(row_ids)])
        valid = tf.not_equal(ids, 0) if layer.mask_zero else tf.ones_like(ids, tf.bool)
        dz = tf.reshape(cotangents[0], [batch, _lookups(row_ids), layer.output_dim])
        return [(table, Rows(ids, valid, dz))]

    tap.watch([rows], uses_of)
    return tf.cast(rows, layer.compute_dtype)


def _lookups(row_ids: tf.Tensor) -> int:
    inner = row_ids.shape[1:]
    return inner.num_elements() if inner.is_fully_defined() else -1


def _checked(row_ids: tf.Tensor, layer: keras.layers.Embedding) -> tf.Tensor:
    worst = tf.reduce_max(tf.bitcast(row_ids, tf.uint64))  # below 0 wraps round to the largest
    message = (
        f"Expected ids in [0, {layer.input_dim}) at layer {layer.path}, got {{}}. "
        "Hash or clip them to the vocabulary before training."
    )
    inside = worst < tf.constant(layer.input_dim, tf.uint64)
    check = require(inside, BadExampleError, message, tf.bitcast(worst, tf.int64))
    with tf.control_dependencies([check]):
        return tf.identity(row_ids)
