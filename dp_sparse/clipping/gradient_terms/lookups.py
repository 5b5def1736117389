"""Lookups of rows: norms of what an example adds to each row, and sums on the rows chosen.

`Tied` is a table that is the output layer, too: its norms need no per-example gradient.

Source: "Phantom Clipping" of the tied-embedding paper. Its formula,
`n_in + ‖RᵀH‖² + 2 Σ R[t, s_l]·⟨G_l, H_t⟩`, may cancel in floating point; here all terms are
squares. With one position, the rows that an example looked up are summed explicitly and the others
are those of an outer product, at the cost of the logits and the lookups themselves. With several
positions, gradients are summed explicitly, of a few examples at a time, which costs what the
gradient of the output layer costs.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import numerics
from dp_sparse.clipping.gradient_terms.numerics import exact, flat, never_cancelled, squares
from dp_sparse.clipping.gradient_terms.product import Product
from dp_sparse.clipping.gradient_terms.scores import Scored, SummedLookups
from dp_sparse.clipping.gradient_terms.term import OF_BATCH
from dp_sparse.core import UnsupportedLayerError, places_of, xla


@dataclasses.dataclass(frozen=True)
class Rows:
    """Lookups in a table, and scores against rows of it that were drawn without the batch.

    With scores, `logits = hidden·W[scored_ids]ᵀ`: an example's gradient of the j-th of these rows
    is `Σ_t scores[t, j]·hidden[t]`, which no tensor holds.

    Attributes:
        row_ids: int64 `[batch, lookups]`.
        valid: bool `[batch, lookups]`: false for masked lookups, which do not train their row.
        cotangents: ∂L/∂(looked-up rows), float32 `[batch, lookups, width]`.
        places: int32 `[batch, lookups]`: which of the step's rows a lookup belongs to, -1 for none;
            set by `restricted`.
        votes: bool `[batch, lookups]`: false for lookups that every example makes alike, which say
            nothing of an example when rows are chosen; None if all vote.
        public_ids: int64 `[rows]`: rows that were drawn without the batch, repeated or not, and
            belong to the step whatever the batch holds; None if there are none.
        scored_ids: int64 `[scored]`, increasing: those that have scores; None if there are none.
        hidden: float32 `[batch, positions, width]`, with scores.
        scores: ∂L/∂logits, float32 `[batch, positions, scored]`; 0 for a repeated id.
        scored_places: int32 `[scored]`: as `places`; set by `restricted`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("cotangents", "hidden", "scores")
    holds_gradients: ClassVar[bool] = False
    row_ids: tf.Tensor
    valid: tf.Tensor
    cotangents: tf.Tensor
    places: tf.Tensor | None = None
    votes: tf.Tensor | None = None
    public_ids: tf.Tensor | None = dataclasses.field(default=None, metadata=OF_BATCH)
    scored_ids: tf.Tensor | None = dataclasses.field(default=None, metadata=OF_BATCH)
    hidden: tf.Tensor | None = None
    scores: tf.Tensor | None = None
    scored_places: tf.Tensor | None = dataclasses.field(default=None, metadata=OF_BATCH)

    @classmethod
    def of_scores(cls, scored_ids: tf.Tensor, hidden: tf.Tensor, scores: tf.Tensor) -> "Rows":
        """Scores alone, without lookups."""
        ids = tf.zeros([tf.shape(hidden)[0], 0], tf.int64)
        nothing = tf.zeros([tf.shape(hidden)[0], 0, hidden.shape[-1]])
        own = cls(ids, tf.cast(ids, tf.bool), nothing, public_ids=scored_ids)
        return dataclasses.replace(own, scored_ids=scored_ids, hidden=hidden, scores=scores)

    def as_public(self) -> "Rows":
        """The same lookups, which every example makes alike."""
        votes = tf.zeros_like(self.valid)
        return dataclasses.replace(self, votes=votes, public_ids=self.row_ids[0])

    @property
    def voting(self) -> tf.Tensor:
        """The lookups that count when rows are chosen, bool `[batch, lookups]`."""
        return self.valid if self.votes is None else self.valid & self.votes

    def restricted(self, places: tf.Tensor, row_ids: tf.Tensor) -> "Rows":
        """The same without what unchosen rows (place -1) and masked lookups would get.

        Args:
            places: int32 `[batch, lookups]`.
            row_ids: The rows of the step, int64, sorted.
        """
        scored = None if self.scored_ids is None else places_of(self.scored_ids, row_ids)
        own = tf.where(self.valid, places, -1)
        return dataclasses.replace(self, places=own, scored_places=scored)

    def squared_norms(self) -> tf.Tensor:
        """Σ over the distinct chosen rows of an example of ‖its gradient of that row‖².

        Costs O(lookups · width), and with scores what the logits cost.
        """
        chosen = tf.cast(self.valid if self.places is None else self.places >= 0, tf.float32)
        if self.scores is None and self.row_ids.shape[1] == 1:
            return squares(self.cotangents) * chosen[:, 0]
        own = SummedLookups.of(self.row_ids, exact(self.cotangents * chosen[..., tf.newaxis]))
        if self.scores is None:
            return never_cancelled(own.squared_norms(), own.masses)
        scored = Scored(self.scored_ids, self.hidden, self._chosen_scores())
        whole, others = own.plus(scored), own.others(scored)
        squared_norms = whole.squared_norms() + exact(others.squared_norms())
        return never_cancelled(squared_norms, whole.masses + exact(others.masses()))

    def clipped_sum(self, factors: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i on the step's rows, float64 `[num_rows, width]`; place -1 is dropped."""
        if tf.get_static_value(num_rows) == 0:  # XLA has no sums of no segments
            return tf.zeros([0, self.cotangents.shape[-1]], tf.float64)
        sums = self._sum_of_lookups(factors, num_rows)
        if self.scores is None:
            return sums
        assert self.hidden is not None and self.scored_places is not None  # with scores
        hidden = flat(self.hidden * numerics.expanded(factors, self.hidden))
        of_scores = tf.matmul(flat(self.scores), hidden, transpose_a=True)
        return sums + tf.math.unsorted_segment_sum(exact(of_scores), self.scored_places, num_rows)

    def _sum_of_lookups(self, factors: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        places, cotangents = tf.reshape(self.places, [-1]), flat(self.cotangents)
        if self.row_ids.shape[1] != 1:
            factors = tf.repeat(factors, tf.shape(self.places)[1])
        if not xla.static_shapes():  # most lookups may be of rows that were not chosen
            chosen = tf.where(places >= 0)[:, 0]
            places, cotangents, factors = (
                tf.gather(each, chosen) for each in (places, cotangents, factors)
            )
        scaled = exact(cotangents * factors[:, tf.newaxis])
        return tf.math.unsorted_segment_sum(scaled, places, num_rows)

    def joined_with(self, others: Sequence["Rows"]) -> "Rows":
        """The lookups of all of them, none restricted yet."""
        parts = [self, *others]
        if sum(part.scores is not None for part in parts) > 1:
            parts = [part.expanded() for part in parts]
        scored = next((part for part in parts if part.scores is not None), self)
        names = ("row_ids", "valid", "cotangents")
        whole = {name: tf.concat([getattr(p, name) for p in parts], axis=1) for name in names}
        if any(part.votes is not None for part in parts):
            votes = [tf.ones_like(p.valid) if p.votes is None else p.votes for p in parts]
            whole["votes"] = tf.concat(votes, axis=1)
        public = [part.public_ids for part in parts if part.public_ids is not None]
        whole["public_ids"] = tf.concat(public, 0) if public else None
        return dataclasses.replace(scored, **whole)

    def expanded(self) -> "Rows":
        """The same with a lookup for each score; takes memory batch · scored · width."""
        if self.scores is None:
            return self
        cotangents = tf.einsum("btn,btd->bnd", self.scores, self.hidden)
        row_ids = tf.broadcast_to(self.scored_ids, tf.shape(cotangents)[:2])
        own = Rows(row_ids, tf.ones_like(row_ids, tf.bool), cotangents)
        nothing = dict.fromkeys(("scored_ids", "hidden", "scores"))
        return dataclasses.replace(self, **nothing).joined_with([own.as_public()])

    def _chosen_scores(self) -> tf.Tensor:
        """0 for rows that the step did not choose, which there are among selected rows alone."""
        scores = self.scores
        if scores is None or self.scored_places is None:
            return scores
        chosen = self.scored_places >= 0
        kept = tf.cond(
            tf.reduce_all(chosen),
            lambda: tf.identity(scores),
            lambda: scores * tf.cast(chosen, tf.float32),
        )
        return tf.ensure_shape(kept, scores.shape)


@dataclasses.dataclass(frozen=True)
class Tied:
    """W `[rows, width]`, looked up and used as `logits = H·Wᵀ`; either may be missing.

    Attributes:
        num_rows: Rows of W.
        row_ids: s, int64 `[batch, lookups]`.
        valid: bool `[batch, lookups]`: false for masked lookups.
        row_cotangents: G, float32 `[batch, lookups, width]`.
        hidden: H, float32 `[batch, positions, width]`.
        logit_cotangents: R, float32 `[batch, positions, rows]`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("row_cotangents", "hidden", "logit_cotangents")
    holds_gradients: ClassVar[bool] = False
    num_rows: int
    row_ids: tf.Tensor
    valid: tf.Tensor
    row_cotangents: tf.Tensor
    hidden: tf.Tensor
    logit_cotangents: tf.Tensor

    @classmethod
    def of_lookups(cls, variable: keras.Variable, term: Rows) -> "Tied":
        """The same lookups, in a variable that is no table: each of its rows gets noise."""
        num_rows, width = variable.shape
        batch, term = tf.shape(term.row_ids)[0], term.expanded()
        hidden, logits = (tf.zeros([batch, 0, size]) for size in (width, num_rows))
        return cls(num_rows, term.row_ids, term.valid, term.cotangents, hidden, logits)

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖² = Σ over the rows of ‖(RᵀH) + Σ of G for that row‖².

        With at most one position, time and memory O(batch · (rows + lookups · width)). With more,
        time O(batch · positions · rows · width), as the output layer itself, and the memory of one
        example's gradient, or of 2²⁰ entries: the clipped sum takes more.
        """
        few = self.hidden.shape[1] in (0, 1)
        norms = self._of_one_position() if few else self._of_several_positions()
        given = tf.sqrt(numerics.squares(self._given(), 2))
        hidden, logits = (
            numerics.squares(self.hidden, 2),
            numerics.squares(self.logit_cotangents, 2),
        )
        masses = tf.reduce_sum(given, 1) + tf.reduce_sum(tf.sqrt(hidden) * tf.sqrt(logits), 1)
        return numerics.never_cancelled(norms, masses)

    def joined_with(self, others: Sequence["Tied"]) -> "Tied":
        """All calls of the layer as one term."""
        parts, names = [self, *others], ("row_ids", "valid", *self.float_fields)
        whole = {name: _concatenated([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(self, **whole)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, float64 `[rows, width]`."""
        as_output = Product(self.logit_cotangents, self.hidden).clipped_sum(factors)
        given = self._given() * numerics.expanded(factors, self.row_cotangents)
        indices = tf.reshape(self.row_ids, [-1, 1])
        return tf.tensor_scatter_nd_add(
            numerics.exact(as_output), indices, numerics.exact(numerics.flat(given))
        )

    def _given(self) -> tf.Tensor:
        """G without masked lookups."""
        return self.row_cotangents * tf.cast(self.valid, tf.float32)[..., tf.newaxis]

    def _of_one_position(self) -> tf.Tensor:
        """‖·‖² over the rows looked up, and ‖r‖²‖h‖² over the others."""
        pairs, sums = self._looked_up()
        r, h = tf.reduce_sum(self.logit_cotangents, axis=1), tf.reduce_sum(self.hidden, axis=1)
        as_output = numerics.exact(tf.gather_nd(r, pairs))[:, tf.newaxis] * numerics.exact(
            tf.gather(h, pairs[:, 0])
        )
        squared = tf.reduce_sum(tf.square(sums + as_output), axis=1)
        norms = tf.math.unsorted_segment_sum(squared, pairs[:, 0], tf.shape(h)[0])
        others = tf.tensor_scatter_nd_update(r, pairs, tf.zeros(tf.shape(pairs)[:1]))
        return tf.cast(norms, tf.float32) + numerics.squares(others) * numerics.squares(h)

    def _of_several_positions(self) -> tf.Tensor:
        """‖·‖² of the whole gradients, a few examples at a time."""
        pairs, sums = self._looked_up()
        batch = tf.shape(self.hidden)[0]
        begins = tf.searchsorted(pairs[:, 0], tf.range(tf.cast(batch, tf.int64) + 1))

        def of_part(begin: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
            hidden = numerics.part_of(self.hidden, begin, size)
            cotangents = numerics.part_of(self.logit_cotangents, begin, size)
            gradients = tf.matmul(cotangents, hidden, transpose_a=True)  # [part, rows, width]
            own = slice(begins[begin], begins[begin + size])  # the pairs of these examples
            given = tf.cast(sums[own], tf.float32)
            first = tf.stack([tf.cast(begin, tf.int64), 0])
            return numerics.squares(tf.tensor_scatter_nd_add(gradients, pairs[own] - first, given))

        return numerics.by_part(batch, self.num_rows * self.hidden.shape[2], of_part)

    def _looked_up(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Each example's distinct rows, in the order of the examples, and the sums of their G.

        (example, row), int64 `[distinct, 2]`, and float64 `[distinct, width]`.
        """
        if xla.static_shapes():
            raise UnsupportedLayerError(
                "Tied embeddings have no static shapes yet: compile with jit_compile=False, or "
                "untie the output layer."
            )
        example = tf.range(tf.shape(self.row_ids, tf.int64)[0])[:, tf.newaxis]
        keys = tf.boolean_mask(example * self.num_rows + self.row_ids, self.valid)
        distinct, slot = tf.unique(keys)
        given = numerics.exact(tf.boolean_mask(self.row_cotangents, self.valid))
        sums = tf.math.unsorted_segment_sum(given, slot, tf.size(distinct))
        return tf.stack([distinct // self.num_rows, distinct % self.num_rows], axis=1), sums


def _concatenated(parts: list[tf.Tensor]) -> tf.Tensor:
    """Along axis 1; a part alone is not copied: cotangents of logits are the step's largest."""
    filled = [part for part in parts if part.shape[1] != 0]
    return tf.concat(filled, axis=1) if len(filled) > 1 else (filled or parts)[0]
