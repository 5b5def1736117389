"""Embedding: rows gathered from the resource variable itself, so the table is never copied.

Keras' own call reads the whole table before it gathers, which copies it after each scatter (330 ms
at 10M rows).

keras-rs' EmbedReduce: looked-up rows r_l, reduced to Σ w_l·r_l over a combiner's divisor.

The rows are recorded before they are reduced, so the table is used through lookups like any other:
the tape gives the cotangent of each row, w_l · dz / divisor, and passes through the weights to
whatever computed them.

keras-hub's PositionEmbedding: rows of W by position, the same rows for every example.

An example's gradient is its cotangent, at its positions. Since all examples use all rows, W is a
dense variable, and no table for a selection of rows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from dp_sparse.clipping import public_rows
from dp_sparse.clipping.gradient_terms import GradientTerm, Product, Rows, Tied, numerics
from dp_sparse.clipping.named_inputs import rounded_to_ids
from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.zero_weights import filled_rows
from dp_sparse.core import (
    BadExampleError,
    PrivacyError,
    UnsupportedLayerError,
    graphs,
    replicas,
    require,
)


def call_embedding(
    layer: keras.layers.Embedding, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor
) -> tf.Tensor:
    """Gathers the rows of `inputs`, integer `[batch, ...]`, and records them as lookups.

    A lookup of id 0 under `mask_zero` is masked: it does not train its row. With LoRA the rows are
    those of E + s·A·B, and A is a table.
    """
    del call
    row_ids, scoring = graphs.as_ids(inputs, layer.path), public_rows.scoring()
    if scoring is not None:
        scoring.is_recorded = True
        return _scored(layer, tap, row_ids, scoring.queries)
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
    row_ids, are_public = _checked_ids(layer, row_ids), public_rows.are_public()
    if are_public:
        row_ids = _alike(layer, row_ids)
    rows = _gathered(layer, tap, row_ids)

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        ids, trained, dz = _by_lookup(row_ids, valid, cotangents[0])
        terms: list[tuple[keras.Variable, GradientTerm]] = []
        if tap.trains(layer._embeddings):
            terms.append((layer._embeddings, Rows(ids, trained, dz)))
        terms += _lora_terms(layer, tap, ids, trained, dz) if layer.lora_enabled else []
        return [(v, _as_public(term)) for v, term in terms] if are_public else terms

    tap.watch([rows], terms_of)
    return tf.cast(rows, layer.compute_dtype)


def _as_public(term: GradientTerm) -> GradientTerm:
    return term.as_public() if isinstance(term, Rows) else term


def _alike(layer: keras.layers.Embedding, row_ids: tf.Tensor) -> tf.Tensor:
    """The ids of negatives, if every example has the same."""
    message = (
        f"Expected negatives that are the same for all examples at layer {layer.path}, got "
        "different ones. Compute them from the ids of the candidates alone."
    )
    same = require(tf.reduce_all(tf.equal(row_ids, row_ids[:1])), PrivacyError, message)
    with tf.control_dependencies([same]):
        return tf.identity(row_ids)


def _scored(
    layer: keras.layers.Embedding, tap: Tap, row_ids: tf.Tensor, queries: tf.Tensor
) -> tf.Tensor:
    """Scores `queries·W[row_ids]ᵀ`, recorded without a gradient for each example and row.

    Args:
        layer: The layer that has the table.
        tap: Records the scores.
        row_ids: int64 `[rows]`, increasing, drawn for all examples alike.
        queries: `[batch, width]` or `[batch, positions, width]`.

    Returns:
        `[batch, rows]` or `[batch, positions, rows]`, of the layer's compute dtype.
    """
    row_ids, dtype = _checked_ids(layer, row_ids), layer.compute_dtype
    rows, queries = tf.cast(_gathered(layer, tap, row_ids), dtype), tf.cast(queries, dtype)
    scores = tf.einsum("...d,nd->...n", queries, rows)

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        hidden = _with_positions(tf.cast(queries, tf.float32))
        of_rows = _with_positions(cotangents[0])
        if layer.mask_zero:
            of_rows *= tf.cast(_unmasked(layer, row_ids), tf.float32)
        terms: list[tuple[keras.Variable, GradientTerm]] = []
        if tap.trains(layer._embeddings):
            terms.append((layer._embeddings, Rows.of_scores(row_ids, hidden, of_rows)))
        if layer.lora_enabled:
            terms += _lora_terms_of_scores(layer, tap, row_ids, hidden, of_rows)
        return terms

    tap.watch([scores], terms_of)
    return scores


def _with_positions(values: tf.Tensor) -> tf.Tensor:
    """`[batch, width]` as `[batch, 1, width]`."""
    return values[:, tf.newaxis] if values.shape.rank == 2 else values


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

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        batch, width, rows = tf.shape(inputs)[0], layer.output_dim, layer.input_dim
        hidden = tf.reshape(tf.cast(inputs, tf.float32), [batch, _lookups(inputs[..., 0]), width])
        dz = tf.reshape(cotangents[0], [batch, _lookups(inputs[..., 0]), rows])
        if not tied:
            return [(variable, Product(hidden, dz))]
        ids = tf.zeros([batch, 0], tf.int64)
        nothing = tf.zeros([batch, 0, width])
        return [(variable, Tied(rows, ids, tf.cast(ids, tf.bool), nothing, hidden, dz))]

    if tap.trains(variable):
        tap.watch([logits], terms_of)
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


def _lora_terms(
    layer: keras.layers.Embedding, tap: Tap, ids: tf.Tensor, valid: tf.Tensor, dz: tf.Tensor
) -> list[tuple[keras.Variable, GradientTerm]]:
    a, b = layer.lora_embeddings_a, layer.lora_embeddings_b
    scaled = dz * (layer.lora_alpha / layer.lora_rank)
    terms: list[tuple[keras.Variable, GradientTerm]] = []
    if tap.trains(a):
        terms.append((a, Rows(ids, valid, tf.einsum("bld,rd->blr", scaled, b.value))))
    if tap.trains(b):
        trained = tf.cast(valid, tf.float32)[..., tf.newaxis]
        terms.append((b, Product(tf.gather(replicas.own_copy(a.value), ids) * trained, scaled)))
    return terms


def _lora_terms_of_scores(
    layer: keras.layers.Embedding,
    tap: Tap,
    row_ids: tf.Tensor,
    hidden: tf.Tensor,
    scores: tf.Tensor,
) -> list[tuple[keras.Variable, GradientTerm]]:
    a, b = layer.lora_embeddings_a, layer.lora_embeddings_b
    scaled = hidden * (layer.lora_alpha / layer.lora_rank)
    terms: list[tuple[keras.Variable, GradientTerm]] = []
    if tap.trains(a):
        narrow = tf.einsum("btd,rd->btr", scaled, b.value)
        terms.append((a, Rows.of_scores(row_ids, narrow, scores)))
    if tap.trains(b):
        rows = tf.gather(replicas.own_copy(a.value), row_ids)
        terms.append((b, Product(tf.einsum("btn,nr->btr", scores, rows), scaled)))
    return terms


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
    row_ids = graphs.as_ids(inputs, layer.path)
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

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        [dz] = cotangents
        if positions is not None:
            span = Span(_at_positions(dz, positions, num_rows), tf.constant(0), num_rows)
        else:
            middle = list(range(1, dz.shape.rank - 2))
            span = Span(tf.reduce_sum(dz, middle), tf.cast(start_index, tf.int32), num_rows)
        return [(layer.position_embeddings, span)]

    tap.watch([outputs], terms_of)
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
