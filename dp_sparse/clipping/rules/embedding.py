"""Embedding: rows gathered from the resource variable itself, so the table is never copied.

Keras' own call reads the whole table before it gathers, which copies it after each scatter (330 ms
at 10M rows).
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.float_ids import rounded_to_ids
from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Product, Rows, Tied, Use
from dp_sparse.clipping.zero_weights import filled_rows
from dp_sparse.core import BadExampleError, replicas, require


def call_embedding(
    layer: keras.layers.Embedding, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Gathers the rows of `inputs`, integer `[batch, ...]`, and records them as lookups.

    A lookup of id 0 under `mask_zero` is masked: it does not train its row. With LoRA the rows are
    those of E + s·A·B, and A is a table.
    """
    del call
    row_ids = tf.cast(inputs, tf.int64)
    return looked_up(layer, tap, row_ids, _unmasked(layer, row_ids))


def looked_up(
    layer: keras.layers.Embedding, tap: Tap, row_ids: tf.Tensor, valid: tf.Tensor
) -> tf.Tensor:
    """Gathers rows and records them as lookups.

    Args:
        layer: The layer that has the table.
        tap: Records the lookups.
        row_ids: int64 `[batch, ...]`.
        valid: bool, of the same shape: whether a lookup trains its row.

    Returns:
        The rows, of the layer's compute dtype, `[batch, ..., width]`.
    """
    row_ids = _checked_ids(layer, row_ids)
    rows = _gathered(layer, tap, row_ids)

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        ids, trained, dz = _by_lookup(row_ids, valid, cotangents[0])
        uses: list[tuple[keras.Variable, Use]] = []
        if tap.trains(layer._embeddings):
            uses.append((layer._embeddings, Rows(ids, trained, dz)))
        return uses + (_lora_uses(layer, tap, ids, trained, dz) if layer.lora_enabled else [])

    tap.watch([rows], uses_of)
    return tf.cast(rows, layer.compute_dtype)


def call_reversible_embedding(
    layer: keras.layers.ReversibleEmbedding,
    call: Callable[..., Any],
    tap: Tap,
    inputs: tf.Tensor,
    reverse: bool = False,
) -> tf.Tensor:
    """Looks rows up, or multiplies with the table; if not tied, with a matrix of its own."""
    if reverse:
        return _logits(layer, tap, inputs)
    rows = call_embedding(layer, call, tap, inputs)
    mask = keras.layers.Embedding.compute_mask(layer, inputs)
    if mask is not None:
        rows._keras_mask = mask
    return rows


def _logits(layer: keras.layers.ReversibleEmbedding, tap: Tap, inputs: tf.Tensor) -> tf.Tensor:
    """H·Wᵀ as the layer computes it; the cotangent is the one before the soft cap."""
    tied, dtype = layer.tie_weights, layer.reverse_dtype or layer.compute_dtype
    variable = layer._embeddings if tied else layer.reverse_embeddings
    weights = tf.cast(variable.value, dtype)
    logits = tf.einsum(
        "...d,vd->...v" if tied else "...d,dv->...v", tf.cast(inputs, dtype), weights
    )

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        batch, width, rows = tf.shape(inputs)[0], layer.output_dim, layer.input_dim
        hidden = tf.reshape(tf.cast(inputs, tf.float32), [batch, _lookups(inputs[..., 0]), width])
        dz = tf.reshape(cotangents[0], [batch, _lookups(inputs[..., 0]), rows])
        if not tied:
            return [(variable, Product(hidden, dz))]
        ids = tf.zeros([batch, 0], tf.int64)
        nothing = tf.zeros([batch, 0, width])
        return [(variable, Tied(rows, ids, tf.cast(ids, tf.bool), nothing, hidden, dz))]

    if tap.trains(variable):
        tap.watch([logits], uses_of)
    cap = layer.logit_soft_cap
    return logits if cap is None else tf.tanh(logits / cap) * cap


def _gathered(layer: keras.layers.Embedding, tap: Tap, row_ids: tf.Tensor) -> tf.Tensor:
    tap.before_lookup(layer._embeddings, row_ids)
    rows = tf.gather(replicas.own_copy(layer._embeddings.value), row_ids)
    rows = filled_rows(layer._embeddings, row_ids, rows)
    if not layer.lora_enabled:
        return rows
    a, b = layer.lora_embeddings_a, layer.lora_embeddings_b.value
    scale = layer.lora_alpha / layer.lora_rank
    tap.before_lookup(a, row_ids)
    return rows + scale * tf.einsum(
        "...r,rd->...d", tf.gather(replicas.own_copy(a.value), row_ids), b
    )


def _lora_uses(
    layer: keras.layers.Embedding, tap: Tap, ids: tf.Tensor, valid: tf.Tensor, dz: tf.Tensor
) -> list[tuple[keras.Variable, Use]]:
    a, b = layer.lora_embeddings_a, layer.lora_embeddings_b
    scaled = dz * (layer.lora_alpha / layer.lora_rank)
    uses: list[tuple[keras.Variable, Use]] = []
    if tap.trains(a):
        uses.append((a, Rows(ids, valid, tf.einsum("bld,rd->blr", scaled, b.value))))
    if tap.trains(b):
        trained = tf.cast(valid, tf.float32)[..., tf.newaxis]
        uses.append((b, Product(tf.gather(replicas.own_copy(a.value), ids) * trained, scaled)))
    return uses


def _unmasked(layer: keras.layers.Embedding, row_ids: tf.Tensor) -> tf.Tensor:
    return tf.not_equal(row_ids, 0) if layer.mask_zero else tf.ones_like(row_ids, tf.bool)


def _by_lookup(
    row_ids: tf.Tensor, valid: tf.Tensor, cotangent: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Ids and validity `[batch, lookups]`, cotangents `[batch, lookups, width]`."""
    lookups = _lookups(row_ids)
    shape = [-1, lookups] if lookups > 0 else [tf.shape(row_ids)[0], lookups]
    ids, valid = tf.reshape(row_ids, shape), tf.reshape(valid, shape)
    return ids, valid, tf.reshape(cotangent, [*shape, cotangent.shape[-1]])


def _lookups(row_ids: tf.Tensor) -> int:
    inner = row_ids.shape[1:]
    return inner.num_elements() if inner.is_fully_defined() else -1


def _checked_ids(layer: keras.layers.Embedding, row_ids: tf.Tensor) -> tf.Tensor:
    fix = "Hash or clip them to the vocabulary before training."
    return in_range("ids", row_ids, layer.input_dim, layer.path, fix)


def in_range(name: str, values: tf.Tensor, limit: int, path: str, fix: str) -> tf.Tensor:
    """`values`, int64 of any shape, if they are in [0, limit), and finite where they were floats.

    Raises:
        BadExampleError: When the step runs, naming the argument, a value and the layer's path.
    """
    worst = tf.reduce_max(tf.bitcast(values, tf.uint64))  # negative values wrap to the largest
    message = f"Expected {name} in [0, {limit}) at layer {path}, got {{}}. {fix}"
    inside = worst < tf.constant(limit, tf.uint64)
    with tf.control_dependencies(_finite(rounded_to_ids(values), message)):
        check = require(inside, BadExampleError, message, tf.bitcast(worst, tf.int64))
    with tf.control_dependencies([check]):
        return tf.identity(values)


def _finite(floats: list[tf.Tensor], message: str) -> list[tf.Operation]:
    """Checks of ids as they were before a cast made integers of them, of NaN any integer."""
    infinite = [tf.abs(tf.reduce_sum(tf.cast(each * 0, tf.float32))) for each in floats]
    return [require(tf.equal(each, 0), BadExampleError, message, each) for each in infinite]
