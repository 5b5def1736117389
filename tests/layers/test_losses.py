"""Softmax over candidates: the estimate, what is drawn, and what is wrong with what is given."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import dp_sparse
from dp_sparse.core.errors import translated
from dp_sparse.layers import losses
from dp_sparse.layers.losses import FullSoftmax, SampledSoftmax
from tests.clipping.brute_force import ids, values
from tests.reference import sampled_softmax

ROWS, WIDTH = 30, 4


def same_uniforms(layer: Any, count: int) -> tf.Tensor:
    return tf.random.stateless_uniform([count], [3, 4], dtype=tf.float64)


def table(rows: int = ROWS, **options: Any) -> keras.layers.Embedding:
    layer = keras.layers.Embedding(rows, WIDTH, **options)
    layer.build()
    layer.embeddings.assign(values(rows, WIDTH, seed=7))
    return layer


def functional() -> keras.Model:
    ids_given = keras.Input((), dtype="int32")
    return keras.Model(ids_given, keras.layers.Embedding(5, 2)(ids_given))


def known(own: np.ndarray) -> dp_sparse.RowFrequencies:
    return dp_sparse.RowFrequencies.public("items", own)


def drawn_by(layer: SampledSoftmax, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> np.ndarray:
    """Ids with their repetitions, of several draws."""
    found, own = [], layer._ids_at

    def kept(uniforms: tf.Tensor) -> tf.Tensor:
        found.append(own(uniforms).numpy())
        return tf.constant(found[-1])

    monkeypatch.setattr(layer, "_ids_at", kept)
    for _ in range(times):
        layer._drawn()
    return np.concatenate(found)


@pytest.mark.parametrize("negatives", [1, 7, 40])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_as_the_reference(
    negatives: int, skewed: bool, positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chances = np.linspace(0.01, 0.9, ROWS) if skewed else np.ones(ROWS)
    items = table()
    layer = SampledSoftmax(items, negatives, known(chances) if skewed else None)
    queries, right = values(6, WIDTH), ids(6, rows=ROWS)
    monkeypatch.setattr(losses, "shared_uniforms", same_uniforms)
    drawn = drawn_by(layer, monkeypatch)
    expected = sampled_softmax.losses(
        queries, items.embeddings.numpy(), right, drawn, chances / chances.sum()
    )
    if positions:
        found = layer(queries.reshape(2, 3, WIDTH), right.reshape(2, 3)).numpy().ravel()
    else:
        found = layer(queries, right).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_sum_over_all_candidates_is_estimated_without_bias() -> None:
    """By skewed chances; without the correction for them it is far off."""
    items, right = table(), 5
    chances = np.linspace(0.05, 0.9, ROWS)
    layer = SampledSoftmax(items, 10, known(chances))
    query = np.full((1, WIDTH), 0.3, np.float32)
    scores = items.embeddings.numpy() @ query[0]
    sums = [np.exp(layer(query, np.array([right])).numpy()[0] + scores[right]) for _ in range(400)]
    error = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - np.exp(scores).sum()) < 5 * error
    uncorrected = np.exp(scores[right]) + 10 * np.sum(np.exp(scores) * chances) / chances.sum()
    assert abs(uncorrected - np.exp(scores).sum()) > 20 * error


@pytest.mark.parametrize("skewed", [False, True])
def test_ids_are_drawn_by_their_chances(skewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chances = np.linspace(0.05, 0.9, ROWS) if skewed else np.ones(ROWS)
    layer = SampledSoftmax(table(), 500, known(chances) if skewed else None)
    counts = np.bincount(drawn_by(layer, monkeypatch, 20), minlength=ROWS)
    expected = counts.sum() * chances / chances.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-5
    wrong = np.roll(expected, 3) if skewed else counts.sum() * np.linspace(0.8, 1.2, ROWS) / ROWS
    assert stats.chisquare(counts, wrong).pvalue < 1e-5


def test_padding_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for frequencies in (None, known(np.ones(ROWS))):
        layer = SampledSoftmax(table(mask_zero=True), 500, frequencies)
        assert drawn_by(layer, monkeypatch).min() == 1
        monkeypatch.undo()


def test_with_all_candidates_alike_it_is_the_full_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate drawn once leaves nothing to estimate."""
    items = keras.layers.ReversibleEmbedding(ROWS, WIDTH)
    items.build()
    queries, right = values(6, WIDTH), ids(6, rows=ROWS)
    layer = SampledSoftmax(items, ROWS)
    monkeypatch.setattr(layer, "_ids_at", lambda uniforms: tf.range(ROWS, dtype=tf.int64))
    full = FullSoftmax(items)(queries, right)
    np.testing.assert_allclose(layer(queries, right), full, rtol=1e-5)
    rows = items._embeddings.numpy()
    expected = keras.losses.sparse_categorical_crossentropy(
        right, queries @ rows.T, from_logits=True
    )
    np.testing.assert_allclose(full, expected, rtol=1e-5)


def test_a_tower_gives_what_its_vectors_give_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "shared_uniforms", same_uniforms)
    tower = keras.Sequential([table(), keras.layers.Dense(WIDTH, activation="tanh")])
    vectors = tower(np.arange(ROWS)).numpy()  # built for ids of this rank
    queries, right = values(6, WIDTH), ids(6, rows=ROWS)
    as_table = table()
    as_table.embeddings.assign(vectors)
    np.testing.assert_allclose(
        SampledSoftmax(tower, 8, num_candidates=ROWS)(queries, right),
        SampledSoftmax(as_table, 8)(queries, right),
        rtol=1e-5,
    )


@pytest.mark.parametrize("make", [
    lambda: SampledSoftmax(table(), 8),
    lambda: SampledSoftmax(table(), 8, known(np.linspace(0.1, 1, ROWS))),
    lambda: FullSoftmax(keras.layers.ReversibleEmbedding(ROWS, WIDTH)),
])  # fmt: skip
def test_saved_and_loaded(make: Any) -> None:
    layer = make()
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()


def test_noisy_frequencies_have_a_release_and_keep_it() -> None:
    noisy = dp_sparse.RowFrequencies("items", np.full(ROWS, 0.1), dp_sparse.GaussianTopK(5.0), 2)
    layer = SampledSoftmax(table(), 8, noisy)
    assert layer.release == noisy.release
    assert SampledSoftmax.from_config(layer.get_config()).release == noisy.release
    assert SampledSoftmax(table(), 8).release is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SampledSoftmax(table(), 0), "negatives"),
        (lambda: SampledSoftmax(table(), np.arange(5)), "how many ids to draw, got ids"),
        (lambda: SampledSoftmax(values(5, WIDTH)), "candidates to be a layer.*ndarray"),
        (lambda: SampledSoftmax(keras.layers.Dense(3)), "num_candidates.*None"),
        (lambda: SampledSoftmax(table(), num_candidates=31), "at most 30.*num_candidates=31"),
        (lambda: SampledSoftmax(table(1)), "num_candidates >= 2"),
        (lambda: SampledSoftmax(table(), 5, np.ones(ROWS)), "RowFrequencies.public.*ndarray"),
        (lambda: SampledSoftmax(table(), 5, known(np.ones(29))), "30 candidates, got 29"),
        (lambda: FullSoftmax(table()), "tied weights, got Embedding"),
        (
            lambda: FullSoftmax(keras.layers.ReversibleEmbedding(5, 2, tie_weights=False)),
            "tied weights, got ReversibleEmbedding",
        ),
        (lambda: SampledSoftmax(functional(), num_candidates=5), "Functional: a model takes ids"),
        (
            lambda: SampledSoftmax(keras.layers.Dropout(0.1), 5, num_candidates=5)(
                values(4, 3), ids(4)
            ),
            "vectors of rank 2, got",
        ),
        (lambda: SampledSoftmax(table(), 5)(values(4, 2, WIDTH), ids(4)), "sampled_softmax.*ids"),
        (lambda: SampledSoftmax(table(), 5)(values(4, WIDTH), ids(3)), "sampled_softmax.*ids"),
        (lambda: SampledSoftmax(table(), 5)(values(4, 2), ids(4)), "candidates' width .*got 2"),
        (
            lambda: SampledSoftmax(table(), 5)(values(4, WIDTH), np.array(["a"] * 4)),
            "Expected ids at layer sampled_softmax.*, got text.*Hashing",
        ),
    ],
)
def test_what_is_wrong_is_said(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}") as caught:
        make()
    assert len(str(caught.value).splitlines()) <= 3 or "Exception" in str(caught.value)


def test_frequencies_are_for_good() -> None:
    """A plan is asked once for what they cost."""
    layer = SampledSoftmax(table(), 5, known(np.ones(ROWS)))
    with pytest.raises(AttributeError):
        layer.frequencies = None


def test_ids_stay_what_they_are_in_half_precision() -> None:
    """Keras casts floats of a mixed policy, in which ids above 2048 are not exact."""
    right = np.array([3001, 3003], np.float32)
    for kind in (keras.layers.Embedding, keras.layers.ReversibleEmbedding):
        items = kind(4096, WIDTH, dtype="float32")
        make = FullSoftmax if kind is keras.layers.ReversibleEmbedding else SampledSoftmax
        layer = make(items, dtype="mixed_float16")
        queries = 30 * items(right.astype("int32")).numpy()
        wrong = layer(queries, right + 1).numpy()
        assert np.all(layer(queries, right).numpy() < wrong)


def test_an_id_beyond_the_table_is_named() -> None:
    layer = FullSoftmax(keras.layers.ReversibleEmbedding(ROWS, WIDTH))
    for bad in (ROWS, -1):
        with pytest.raises(dp_sparse.BadExampleError, match=rf"30\).*{bad}"), translated():
            layer(values(2, WIDTH), np.array([3, bad]))
