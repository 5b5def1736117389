"""Norms where an example scores rows that all examples share, and looks up rows of its own.

With r_j the cotangents of its scores of row j, over positions, and H its hidden vectors, the
gradient of row j is `Hᵀr_j`, plus the summed cotangents of its own lookups of that row. Rows that
it looked up are summed explicitly; what is left is a product, whose norm needs no gradient. So
nothing cancels, and nothing takes memory of batch · scored · width.
"""

import dataclasses

import tensorflow as tf

from dp_sparse.clipping.gradient_terms.numerics import exact, flat, squares
from dp_sparse.clipping.gradient_terms.product import Product
from dp_sparse.core import UnsupportedLayerError, grouped, places_of, xla


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores against shared rows.

    Attributes:
        row_ids: int64 `[scored]`, increasing.
        hidden: H, float32 `[batch, positions, width]`.
        scores: r, float32 `[batch, positions, scored]`.
    """

    row_ids: tf.Tensor
    hidden: tf.Tensor
    scores: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        """‖rᵀH‖² of each example, float32 `[batch]`."""
        if self.hidden.shape[1] == 1:
            return squares(self.scores) * squares(self.hidden)
        return Product(self.hidden, self.scores).squared_norms()

    def masses(self) -> tf.Tensor:
        """Σ over positions of ‖r_t‖·‖h_t‖, float32 `[batch]`."""
        if self.hidden.shape[1] == 1:
            return tf.sqrt(self.squared_norms())
        by_position = tf.sqrt(squares(self.scores, 2)) * tf.sqrt(squares(self.hidden, 2))
        return tf.reduce_sum(by_position, axis=1)


@dataclasses.dataclass(frozen=True)
class SummedLookups:
    """Each example's distinct rows, and the sums of its cotangents for them.

    Attributes:
        examples: int64 `[pairs]`; under XLA also pairs of no example, -1.
        row_ids: int64 `[pairs]`.
        sums: float64 `[pairs, width]`.
        masses: Σ of the norms of all cotangents of an example, float64 `[batch]`.
    """

    examples: tf.Tensor
    row_ids: tf.Tensor
    sums: tf.Tensor
    masses: tf.Tensor

    @classmethod
    def of(cls, row_ids: tf.Tensor, cotangents: tf.Tensor) -> "SummedLookups":
        """From lookups `[batch, lookups]` and float64 cotangents `[batch, lookups, width]`."""
        batch = tf.shape(row_ids, tf.int64)[0]
        example = tf.repeat(tf.range(batch), tf.shape(row_ids)[1])
        num_rows = tf.reduce_max(tf.concat([[0], tf.reshape(row_ids, [-1])], 0)) + 1
        groups = grouped(example * num_rows + tf.reshape(row_ids, [-1]), -1)
        pairs = groups.values
        sums = tf.math.unsorted_segment_sum(flat(cotangents), groups.places, tf.size(pairs))
        masses = tf.reduce_sum(tf.norm(cotangents, axis=2), axis=1)
        return cls(pairs // num_rows, pairs % num_rows, sums, masses)

    def squared_norms(self) -> tf.Tensor:
        """Σ of the squares of an example's sums, float64 `[batch]`."""
        squared = tf.reduce_sum(tf.square(self.sums), axis=1)
        return tf.math.unsorted_segment_sum(squared, self.examples, tf.size(self.masses))

    def plus(self, scored: Scored) -> "SummedLookups":
        """The same rows with what the scores add to them."""
        pairs, examples, places = self._shared(scored)
        own = exact(_at(scored.scores, examples, places)) * _found(pairs, tf.float64)
        hidden = exact(tf.gather(scored.hidden, examples))
        added = tf.einsum("pt,ptd->pd", own, hidden)
        sums = tf.math.unsorted_segment_sum(added, pairs, tf.shape(self.sums)[0])
        norms = tf.reduce_sum(tf.abs(own) * tf.norm(hidden, axis=2), axis=1)
        masses = tf.math.unsorted_segment_sum(norms, examples, tf.size(self.masses))
        return dataclasses.replace(self, sums=self.sums + sums, masses=self.masses + masses)

    def others(self, scored: Scored) -> Scored:
        """The scores of the rows that an example did not look up; the others are 0."""
        pairs, examples, places = self._shared(scored)
        own = _at(scored.scores, examples, places) * _found(pairs, tf.float32)
        where = tf.stack([examples, places], 1)
        left = _swapped(tf.tensor_scatter_nd_sub(_swapped(scored.scores), where, own))
        return dataclasses.replace(scored, scores=tf.ensure_shape(left, scored.scores.shape))

    def _shared(self, scored: Scored) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Pairs whose row has a score: their place here, their example, their place there.

        Under XLA all pairs, with place -1 where there is none.
        """
        if xla.static_shapes() and scored.hidden.shape[1] != 1:
            raise UnsupportedLayerError(
                "Sampled scores of several positions have no static shapes yet: compile with "
                "jit_compile=False."
            )
        places = places_of(self.row_ids, scored.row_ids)
        pairs = tf.where((places >= 0) & (self.examples >= 0), tf.range(tf.size(places)), -1)
        if not xla.static_shapes():
            pairs = tf.boolean_mask(pairs, pairs >= 0)
        there = tf.maximum(pairs, 0)
        own = tf.maximum(tf.gather(self.examples, there), 0)
        return pairs, own, tf.cast(tf.maximum(tf.gather(places, there), 0), tf.int64)


def _at(scores: tf.Tensor, examples: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """`scores[example, :, place]` of each pair, `[pairs, positions]`."""
    return tf.gather_nd(_swapped(scores), tf.stack([examples, places], 1))


def _swapped(values: tf.Tensor) -> tf.Tensor:
    """The last two axes the other way round; no copy where one of them is 1."""
    _, first, second = values.shape
    if 1 in (first, second):
        return tf.reshape(values, [tf.shape(values)[0], second, first])
    return tf.transpose(values, [0, 2, 1])


def _found(pairs: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """1 for pairs with a score, else 0, `[pairs, 1]`."""
    return tf.cast(pairs >= 0, dtype)[:, tf.newaxis]
