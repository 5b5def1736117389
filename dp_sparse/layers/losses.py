"""Softmax over many candidates, for losses of retrieval that know no other example.

In-batch negatives compare each example with the others of its batch, so that no loss made of them
is private. `SampledSoftmax` draws its negatives from a public distribution instead, once for all
examples of a step, which costs what in-batch negatives cost. `FullSoftmax` compares with all
candidates of a table.

With n ids drawn from q, Σ_j exp(s_j) / (n·q_j) over the drawn j that are not the example's own
candidate estimates the sum over all others without bias ("log-q correction", as in Yi et al.,
RecSys 2019, without the correction of the own score, which is not drawn).
"""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import Release
from dp_sparse.clipping import public_lookups, scored_by, shared_uniforms
from dp_sparse.core import BadExampleError, graphs, places_of, require, validate
from dp_sparse.layers.paid import PaidByPlan
from dp_sparse.selection import RowFrequencies

__all__ = ["FullSoftmax", "SampledSoftmax"]

_WITH_TABLE = (keras.layers.Embedding, keras.layers.ReversibleEmbedding)


@keras.saving.register_keras_serializable(package="dp_sparse")
class SampledSoftmax(PaidByPlan, keras.layers.Layer):
    """Cross-entropy of the right candidate against some that are drawn without the batch.

    Make it in the model's `__init__` and call it in `compute_loss`, or on the model's inputs.

    Args:
        candidates: The layer that has the candidates' vectors: an `Embedding`, or a tower, a layer
            or a `Sequential` of several, from ids `[...]` to vectors `[..., width]`.
        negatives: How many ids are drawn for a step, repetitions included.
        frequencies: How often to draw each candidate: `RowFrequencies.public(...)`, or what
            `noisy_frequencies` gives, whose release the plan must have. By default all are equally
            likely.
        num_candidates: How many there are; by default the rows of an `Embedding`.
        **kwargs: As Keras' layers.

    Call arguments:
        queries: Float `[batch, width]` or `[batch, positions, width]`.
        ids: The right candidates, integers `[batch]` or `[batch, positions]`.

    A call returns losses, float32, of the shape of `ids`.

    Raises:
        ValueError: Numbers out of their range, frequencies of other candidates, or shapes that do
            not fit.
        UnsupportedLayerError: In training by a loop of `dp_sparse.distribution`.

    Id 0 is not drawn if an `Embedding` of `candidates` has `mask_zero`.

    With an `Embedding` a step costs what in-batch negatives cost, and holds no gradient of
    `[batch, negatives, width]`. A tower runs on the negatives once for each example, so draw fewer.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> items = keras.layers.Embedding(1000, 8)
        >>> softmax = dp_sparse.losses.SampledSoftmax(items, negatives=64)
        >>> softmax(np.zeros((2, 8), "float32"), np.array([3, 7])).shape
        TensorShape([2])

    ### Formal Guarantees
    The drawn ids do not depend on examples: they come from random numbers of the step and from
    `frequencies`. Their rows join the rows of the step without a vote, and get its noise. An
    example's loss uses its own query and its own id, and no other example's.
    """

    def __init__(
        self,
        candidates: keras.layers.Layer,
        negatives: int = 1024,
        frequencies: RowFrequencies | None = None,
        num_candidates: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        self.candidates = _checked_candidates(candidates)
        self.negatives = _number_of_negatives(negatives)
        self.num_candidates = _number_of(candidates, num_candidates)
        self._frequencies = _checked_frequencies(frequencies, self.num_candidates)
        _build(self.candidates, (None,))
        self._tables: tuple[tf.Tensor, tf.Tensor] | None = None
        self._seeds = keras.random.SeedGenerator()

    @property
    def frequencies(self) -> RowFrequencies | None:
        """How often each candidate is drawn, for good; None if all are equally likely."""
        return self._frequencies

    @property
    def release(self) -> Release | None:  # type: ignore[override]
        """What the plan must pay for; None if the frequencies are public."""
        own = self._frequencies
        return None if own is None or not own.costs else own.release

    @property
    def _first(self) -> int:
        """The least id that is drawn: 0 is padding in a table with `mask_zero`."""
        inner = self.candidates._flatten_layers()
        return int(any(getattr(layer, "mask_zero", False) for layer in inner))

    def compute_output_spec(self, queries: Any, ids: Any) -> keras.KerasTensor:
        """Of the shape of `ids`."""
        return keras.KerasTensor(ids.shape, "float32")

    def call(self, queries: Any, ids: Any) -> Any:
        """The losses; see the class."""
        queries, ids = tf.convert_to_tensor(queries), graphs.as_ids(ids, self.path)
        _require_shapes(self.path or self.name, queries, ids)
        own = tf.cast(self._vectors(ids), tf.float32)
        _require_width(self.path or self.name, queries, own)
        score = tf.reduce_sum(tf.cast(queries, tf.float32) * own, axis=-1, keepdims=True)
        drawn, log_weights = self._drawn()
        others = tf.cast(self._scores(queries, drawn), tf.float32) + log_weights
        return _cross_entropy(score, others, places_of(tf.reshape(ids, [-1]), drawn))

    def _vectors(self, ids: tf.Tensor) -> tf.Tensor:
        vectors = _called(self.candidates, ids)
        if vectors.shape.rank != ids.shape.rank + 1:
            raise ValueError(
                f"{self.path or self.name}: expected candidates from ids of rank {ids.shape.rank} "
                f"to vectors of rank {ids.shape.rank + 1}, got {tuple(vectors.shape)} of "
                f"{type(self.candidates).__name__}: give one vector for each id."
            )
        return vectors

    def _scores(self, queries: tf.Tensor, drawn: tf.Tensor) -> tf.Tensor:
        """`[batch, ..., negatives]`."""
        if type(self.candidates) in _WITH_TABLE:
            with scored_by(queries) as scoring:
                found = self.candidates(drawn)
            if scoring.is_recorded:
                return found
            return tf.tensordot(queries, tf.cast(found, queries.dtype), [[-1], [-1]])
        shape = [tf.shape(queries)[0], self.negatives]
        with public_lookups():
            vectors = self._vectors(tf.broadcast_to(drawn, shape))
        vectors = tf.cast(vectors, queries.dtype)
        of_one = "bd,bnd->bn" if queries.shape.rank == 2 else "btd,bnd->btn"
        return tf.einsum(of_one, queries, vectors)

    def _drawn(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Distinct ids, increasing, int64 `[negatives]`, and log(times drawn / (n·q)), float32.

        Where an id was drawn again, the largest stands, with the weight of 0 times.
        """
        count = self.negatives
        uniforms = shared_uniforms(self, count)
        if uniforms is None:
            uniforms = tf.cast(keras.random.uniform([count], seed=self._seeds), tf.float64)
        ordered = tf.sort(self._ids_at(uniforms))
        again = tf.concat([[False], ordered[1:] == ordered[:-1]], 0)
        places = tf.cumsum(tf.cast(~again, tf.int32)) - 1
        filled = tf.fill([count], ordered[-1])
        ids = tf.tensor_scatter_nd_update(filled, places[:, tf.newaxis], ordered)
        times = tf.math.unsorted_segment_sum(tf.ones([count]), places, count)
        return ids, tf.math.log(times) - self._log_expected(ids)

    def _ids_at(self, uniforms: tf.Tensor) -> tf.Tensor:
        first, end = self._first, self.num_candidates
        if self.frequencies is None:
            ids = tf.cast(uniforms * (end - first), tf.int64) + first
        else:
            ids = tf.searchsorted(self._constants()[0], uniforms, side="right", out_type=tf.int64)
        return tf.clip_by_value(ids, first, end - 1)

    def _log_expected(self, ids: tf.Tensor) -> tf.Tensor:
        """log(n·q), how often an id is expected to be drawn."""
        if self.frequencies is None:
            chance = 1 / (self.num_candidates - self._first)
            return tf.constant(math.log(self.negatives * chance), tf.float32)
        return tf.gather(self._constants()[1], ids)

    def _constants(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums of the chances up to each candidate, and log(n·q); outside of any graph."""
        if self._tables is None:
            assert self.frequencies is not None
            with tf.init_scope():
                chances = np.where(np.arange(self.num_candidates) < self._first, 0.0, 1.0)
                chances *= self.frequencies.values
                sums = np.cumsum(chances)
                logs = np.log(self.negatives * np.maximum(chances, 1e-300) / sums[-1])
                self._tables = tf.constant(sums / sums[-1]), tf.constant(logs, tf.float32)
        return self._tables

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description."""
        own = self.frequencies
        if own is not None and self.is_paid:  # once paid for, they are known
            own = RowFrequencies.public(own.table, own.values)
        return {
            **super().get_config(),
            "candidates": keras.saving.serialize_keras_object(self.candidates),
            "negatives": self.negatives,
            "frequencies": None if own is None else own.get_config(),
            "num_candidates": self.num_candidates,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SampledSoftmax":
        """The layer that `get_config` described."""
        own = dict(config)
        own["candidates"] = keras.saving.deserialize_keras_object(own["candidates"])
        if own["frequencies"] is not None:
            own["frequencies"] = RowFrequencies.from_config(own["frequencies"])
        return cls(**own)


@keras.saving.register_keras_serializable(package="dp_sparse")
class FullSoftmax(keras.layers.Layer):
    """Cross-entropy of the right candidate against all candidates of a table.

    Reads the table whole, so every row of it gets noise in each step, as with DP-SGD; it is the
    loss for up to some ten thousand candidates. No tensor holds `[batch, candidates, width]`.

    Args:
        candidates: A `keras.layers.ReversibleEmbedding` with tied weights, of all candidates.
        **kwargs: As Keras' layers.

    Call arguments:
        queries: Float `[batch, width]` or `[batch, positions, width]`.
        ids: The right candidates, integers `[batch]` or `[batch, positions]`, below the table's
            rows.

    A call returns losses, float32, of the shape of `ids`.

    Raises:
        ValueError: Another layer, or shapes that do not fit.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> softmax = dp_sparse.losses.FullSoftmax(keras.layers.ReversibleEmbedding(1000, 8))
        >>> softmax(np.zeros((2, 8), "float32"), np.array([3, 7])).numpy().round(2)  # log 1000
        array([6.91, 6.91], dtype=float32)

    ### Formal Guarantees
    An example's loss uses its own query and its own id, and no other example's.
    """

    def __init__(self, candidates: keras.layers.ReversibleEmbedding, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        if not getattr(candidates, "tie_weights", False):
            raise ValueError(
                "Expected candidates to be a keras.layers.ReversibleEmbedding with tied weights, "
                f"got {type(candidates).__name__}: only it multiplies with its table. "
                "SampledSoftmax takes any layer."
            )
        self.candidates = candidates
        _build(candidates, (None,))

    @property
    def reads_whole(self) -> list[keras.layers.Layer]:
        """The layers whose table is multiplied, and not only looked up."""
        return [self.candidates]

    def compute_output_spec(self, queries: Any, ids: Any) -> keras.KerasTensor:
        """Of the shape of `ids`."""
        return keras.KerasTensor(ids.shape, "float32")

    def call(self, queries: Any, ids: Any) -> Any:
        """The losses; see the class."""
        queries, ids = tf.convert_to_tensor(queries), graphs.as_ids(ids, self.path)
        _require_shapes(self.path or self.name, queries, ids)
        logits = tf.cast(self.candidates(queries, reverse=True), tf.float32)
        rows = self.candidates.input_dim
        fix = "Map them to rows of the table."
        message = f"Expected ids in [0, {rows}) at layer {self.path}, got {{}}. {fix}"
        worst = tf.reduce_max(tf.bitcast(ids, tf.uint64))  # negative ones wrap to the largest
        inside = worst < tf.constant(rows, tf.uint64)
        check = require(inside, BadExampleError, message, tf.bitcast(worst, tf.int64))
        with tf.control_dependencies([check]):
            ids = tf.identity(ids)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits)

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description."""
        candidates = keras.saving.serialize_keras_object(self.candidates)
        return {**super().get_config(), "candidates": candidates}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FullSoftmax":
        """The layer that `get_config` described."""
        own = dict(config)
        own["candidates"] = keras.saving.deserialize_keras_object(own["candidates"])
        return cls(**own)


@tf.custom_gradient
def _cross_entropy(
    score: tf.Tensor, others: tf.Tensor, own_places: tf.Tensor
) -> tuple[tf.Tensor, Any]:
    """−log of the softmax of `score` beside `others`, `[...]`.

    Takes the exponentials once, for the loss and its gradient; TensorFlow's own takes them twice.

    Args:
        score: Float32 `[..., 1]`.
        others: `[..., negatives]`.
        own_places: int32, flat: which of the others is the right candidate, and does not count; -1
            for none.
    """
    shape, count = tf.shape(others), others.shape[-1]
    highest = tf.maximum(tf.reduce_max(others, -1, keepdims=True), score)
    powers = tf.reshape(tf.exp(others - highest), [-1, count])
    where = tf.stack([tf.range(tf.shape(powers)[0]), tf.maximum(own_places, 0)], axis=1)
    lost = tf.where(own_places >= 0, tf.gather_nd(powers, where), 0.0)
    powers = tf.reshape(tf.tensor_scatter_nd_sub(powers, where, lost), shape)
    own = tf.exp(score - highest)
    total = own + tf.reduce_sum(powers, -1, keepdims=True)

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, None]:
        upstream = upstream[..., tf.newaxis]
        return upstream * (own / total - 1.0), powers * (upstream / total), None

    return (tf.math.log(total) + highest - score)[..., 0], gradient


def _checked_candidates(candidates: Any) -> keras.layers.Layer:
    if not isinstance(candidates, keras.layers.Layer):
        raise ValueError(
            "Expected candidates to be a layer from ids to vectors, such as an Embedding, got "
            f"{type(candidates).__name__}: negatives are drawn here, not given."
        )
    if isinstance(candidates, keras.Model) and not isinstance(candidates, keras.Sequential):
        raise ValueError(
            f"Expected candidates to be a layer or a Sequential, got {type(candidates).__name__}: "
            "a model takes ids of one shape alone. Give its layers as a keras.Sequential."
        )
    return candidates


def _build(candidates: keras.layers.Layer, shape: Any) -> None:
    """Builds an Embedding, or a tower of layers that know their shapes, for ids of this shape.

    A table that is first built inside of a call is not saved with its model.
    """
    layers = candidates.layers if isinstance(candidates, keras.Sequential) else [candidates]
    for layer in layers:
        if isinstance(layer, keras.Sequential):
            _build(layer, shape)
        elif not layer.built:
            layer.build(shape)
        shape = layer.compute_output_shape(shape)


def _called(layer: keras.layers.Layer, ids: tf.Tensor) -> tf.Tensor:
    """A Sequential may have been built for ids of another rank, so its layers are called."""
    if not isinstance(layer, keras.Sequential):
        return layer(ids)
    for inner in layer.layers:
        ids = _called(inner, ids)
    return ids


def _number_of_negatives(negatives: Any) -> int:
    if getattr(negatives, "shape", ()) or isinstance(negatives, list | tuple):
        raise ValueError(
            "Expected negatives to be how many ids to draw, got ids: they are drawn here, since "
            "those of a batch would make an example's loss depend on the other examples."
        )
    return validate.positive_integer("negatives", negatives)


def _number_of(candidates: keras.layers.Layer, given: int | None) -> int:
    """How many candidates there are."""
    rows = getattr(candidates, "input_dim", None)
    if given is None and rows is None:
        raise ValueError(
            f"Expected num_candidates for candidates={type(candidates).__name__}, got None: say "
            "how many ids its tables have."
        )
    number = validate.positive_integer("num_candidates", rows if given is None else given)
    if number < 2:
        raise ValueError(f"Expected num_candidates >= 2, got num_candidates={number}.")
    if rows is not None and number > rows:
        raise ValueError(
            f"Expected num_candidates of at most {rows}, the rows of candidates, got "
            f"num_candidates={number}."
        )
    return number


def _checked_frequencies(frequencies: Any, num_candidates: int) -> RowFrequencies | None:
    if frequencies is None:
        return None
    if not isinstance(frequencies, RowFrequencies):
        raise ValueError(
            "Expected frequencies from noisy_frequencies, or RowFrequencies.public(table, values) "
            f"if they are public, got {type(frequencies).__name__}."
        )
    if len(frequencies.values) != num_candidates:
        raise ValueError(
            f"Expected frequencies of {num_candidates} candidates, got {len(frequencies.values)}: "
            "the table of candidates and the counts must have the same rows."
        )
    return frequencies


def _require_width(path: str, queries: tf.Tensor, vectors: tf.Tensor) -> None:
    """Raises ValueError unless queries are as wide as the candidates' vectors."""
    if not queries.shape[-1:].is_compatible_with(vectors.shape[-1:]):
        raise ValueError(
            f"{path}: expected queries of the candidates' width {vectors.shape[-1]}, got "
            f"{queries.shape[-1]}: end the query's tower in a Dense layer of that width."
        )


def _require_shapes(path: str, queries: tf.Tensor, ids: tf.Tensor) -> None:
    """Raises ValueError unless there is an id for each query."""
    rank = queries.shape.rank
    if rank not in (2, 3) or not queries.shape[:-1].is_compatible_with(ids.shape):
        raise ValueError(
            f"{path}: expected queries [batch, width] with ids [batch], or [batch, positions, "
            f"width] with [batch, positions], got {tuple(queries.shape)} with {tuple(ids.shape)}."
        )
