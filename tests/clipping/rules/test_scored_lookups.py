"""Scores against rows that all examples share: exact against brute force, beside other lookups."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dp_sparse.clipping.gradient_terms import Rows, joined
from dp_sparse.layers import losses
from tests.clipping.brute_force import assert_as_brute_force, ids, values

ROWS = 9


def same_uniforms(layer: Any, count: int) -> tf.Tensor:
    return tf.random.stateless_uniform([count], [3, 4], dtype=tf.float64)


@pytest.fixture(autouse=True)
def _same_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brute force runs the model outside of a recorded pass, where seeds are others."""
    monkeypatch.setattr(losses, "shared_uniforms", same_uniforms)


def retrieval(
    positions: int | None,
    width: int,
    negatives: int,
    *,
    masked: bool = False,
    history: int = 0,
    tower: bool = False,
    rank: int | None = None,
    calls: int = 1,
) -> tuple[keras.Model, list[np.ndarray]]:
    """Users against sampled items, and a batch; queries have `history` items of the same table."""
    shape = () if positions is None else (positions,)
    items = keras.layers.Embedding(
        ROWS, width, mask_zero=masked, embeddings_initializer="random_normal"
    )
    users = keras.layers.Embedding(6, width, embeddings_initializer="random_normal")
    right = keras.Input(shape, dtype="int32")
    user, old = keras.Input(shape, dtype="int32"), keras.Input((history,), dtype="int32")
    query = users(user)
    if history:
        mean = keras.ops.mean(items(old), axis=1)
        query = query + (mean if positions is None else mean[:, None])
    layers = [items, keras.layers.Dense(width, activation="tanh")] if tower else [items]
    candidates = keras.Sequential(layers) if tower else items
    made = []
    for number in range(calls):
        softmax = losses.SampledSoftmax(candidates, negatives, num_candidates=ROWS)
        made.append(softmax(query * (number + 1.0), right))
    model = keras.Model([user, right, old], keras.ops.stack(made, -1))
    if rank is not None:
        items.enable_lora(rank)
        items.lora_embeddings_b.assign(values(rank, width, seed=9))
    x = [ids(5, *shape, rows=6), ids(5, *shape, rows=ROWS, seed=1), ids(5, history, rows=ROWS)]
    return model, [x[0], *(np.maximum(each, int(masked)) for each in x[1:])]


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    positions=st.sampled_from([None, 1, 3]),
    width=st.integers(1, 4),
    negatives=st.integers(1, 12),
    masked=st.booleans(),
    history=st.integers(0, 3),
    tower=st.booleans(),
    rank=st.sampled_from([None, 2]),
    calls=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_retrieval(seed: int, **settings_of: Any) -> None:
    keras.utils.set_random_seed(seed)
    model, x = retrieval(**settings_of)
    assert_as_brute_force(model, x, seed=seed)


def scored(ids_of: list[int], hidden: np.ndarray, scores: np.ndarray) -> Rows:
    return Rows.of_scores(tf.constant(ids_of, tf.int64), tf.constant(hidden), tf.constant(scores))


def looked_up(row_ids: np.ndarray, cotangents: np.ndarray) -> Rows:
    found = tf.constant(row_ids, tf.int64)
    return Rows(found, tf.ones_like(found, tf.bool), tf.constant(cotangents))


def whole(terms: list[Rows]) -> np.ndarray:
    """Gradients `[batch, rows, width]` by loops."""
    batch, width = len(terms[0].row_ids), terms[0].cotangents.shape[-1]
    total = np.zeros((batch, ROWS, width))
    for term in terms:
        for example in range(batch):
            for row, one in zip(term.row_ids[example], term.cotangents[example], strict=True):
                total[example, int(row)] += one
        if term.scores is None:
            continue
        for place, row in enumerate(term.scored_ids.numpy()):
            scores = term.scores.numpy()[:, :, place].astype(np.float64)
            total[:, int(row)] += np.einsum("bt,btd->bd", scores, term.hidden.numpy())
    return total


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("chosen", [range(ROWS), [0, 2, 3, 8], []])
@pytest.mark.parametrize("several", [False, True])
def test_norms_and_sums_on_the_chosen_rows(positions: int, chosen: Any, several: bool) -> None:
    """Rows that are looked up and scored, only one of both, and neither chosen nor not."""
    parts = [
        looked_up(ids(4, 5, rows=ROWS), values(4, 5, 2)),
        scored([0, 1, 3, 5, 8], values(4, positions, 2, seed=1), values(4, positions, 5, seed=2)),
    ]
    if several:
        more = scored([2, 3], values(4, positions, 2, seed=3), values(4, positions, 2, seed=4))
        parts.append(more)
    term = joined(parts)
    rows = np.asarray(list(chosen), np.int64)
    places = np.full(ROWS, -1, np.int32)
    places[rows] = np.arange(len(rows))
    term = term.restricted(tf.gather(places, term.row_ids), tf.constant(rows))
    expected = whole(parts) * (places >= 0)[:, np.newaxis]
    norms = np.square(expected).sum((1, 2))
    np.testing.assert_allclose(term.squared_norms(), norms, rtol=1e-5, atol=1e-9)
    factors = tf.constant([0.5, 0.0, 1.0, 2.0])
    sums = term.clipped_sum(factors, tf.constant(len(rows)))
    np.testing.assert_allclose(
        sums, np.einsum("b,brd->rd", factors, expected)[rows], rtol=1e-5, atol=1e-6
    )


def test_a_repeated_row_has_its_score_once() -> None:
    """Filler repeats the last id with scores of 0, so that the number of ids is known."""
    hidden, scores = values(4, 1, 2), values(4, 1, 3, seed=1)
    padded = np.concatenate([scores, np.zeros((4, 1, 2), np.float32)], -1)
    own = looked_up(np.full((4, 1), 7), values(4, 1, 2, seed=2))
    few = joined([own, scored([1, 4, 7], hidden, scores)])
    more = joined([own, scored([1, 4, 7, 7, 7], hidden, padded)])
    np.testing.assert_allclose(few.squared_norms(), more.squared_norms(), rtol=1e-6)


def test_terms_that_cancel_keep_a_norm() -> None:
    """A lookup that takes back what the score gave: float32 must not call the rest nothing."""
    hidden, scores = np.full((1, 1, 2), 1e3, np.float32), np.full((1, 1, 1), 1e3, np.float32)
    term = joined([looked_up(np.zeros((1, 1)), -1e6 * np.ones((1, 1, 2), np.float32)),
                   scored([0], hidden, scores)])  # fmt: skip
    mass = 2 * np.sqrt(2) * 1e6
    assert term.squared_norms().numpy()[0] >= (mass / 1001) ** 2


def test_lookups_of_scores_do_not_vote_and_others_do() -> None:
    own = looked_up(ids(4, 2, rows=ROWS), values(4, 2, 2))
    term = joined([own, scored([1, 4], values(4, 1, 2), values(4, 1, 2)).expanded()])
    assert term.voting.numpy().tolist() == [[True, True, False, False]] * 4
    assert sorted(set(term.public_ids.numpy().tolist())) == [1, 4]
