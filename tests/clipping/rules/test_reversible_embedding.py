"""Tied and untied output layers: exact against brute force, and nothing of [batch, rows, width]."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse import clipping
from dp_sparse.clipping.uses import Tied, joined, numerics
from tests.clipping.brute_force import assert_as_brute_force, values
from tests.subprocesses import run_python


def language_model(
    rows: int, width: int, length: int, *, tied: bool, last: bool, masked: bool, cap: float | None
) -> keras.Model:
    ids = keras.Input((length,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(
        rows, width, tie_weights=tied, mask_zero=masked, logit_soft_cap=cap
    )
    hidden = keras.layers.Dense(width, activation="tanh")(table(ids))
    if last:
        hidden = hidden[:, -1]
    return keras.Model(ids, table(hidden, reverse=True))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(2, 9),
    width=st.integers(1, 4),
    length=st.integers(1, 5),
    tied=st.booleans(),
    last=st.booleans(),
    masked=st.booleans(),
    cap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_language_models(
    rows: int,
    width: int,
    length: int,
    tied: bool,
    last: bool,
    masked: bool,
    cap: float | None,
    seed: int,
) -> None:
    keras.utils.set_random_seed(seed)
    model = language_model(rows, width, length, tied=tied, last=last, masked=masked, cap=cap)
    ids = np.random.default_rng(seed).integers(1 if masked else 0, rows, (4, length))
    assert_as_brute_force(model, ids)


def test_looked_up_by_two_features_and_tied() -> None:
    one, two = (keras.Input((3,), dtype="int32") for _ in range(2))
    table = keras.layers.ReversibleEmbedding(6, 4)
    hidden = keras.layers.Dense(4)(keras.layers.Concatenate(axis=1)([table(one), table(two)]))
    model = keras.Model([one, two], table(hidden, reverse=True))
    rng = np.random.default_rng(0)
    assert_as_brute_force(model, [rng.integers(0, 6, (4, 3)) for _ in range(2)])


def test_a_tied_table_is_dense_and_an_untied_one_a_table() -> None:
    for tied in (True, False):
        model = language_model(6, 4, 3, tied=tied, last=False, masked=False, cap=None)
        assert len(clipping.embedding_tables(model)) == (not tied)


def test_only_looked_up() -> None:
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.layers.ReversibleEmbedding(6, 4)(ids))
    assert_as_brute_force(model, np.random.default_rng(0).integers(0, 6, (4, 3)))


def random_use(
    batch: int, lookups: int, positions: int, rows: int = 7, width: int = 3, masked: float = 0.3
) -> Tied:
    rng = np.random.default_rng(lookups)
    return Tied(
        rows,
        tf.constant(rng.integers(0, rows, (batch, lookups))),
        tf.constant(rng.random((batch, lookups)) >= masked),
        tf.constant(values(batch, lookups, width)),
        tf.constant(values(batch, positions, width, seed=1)),
        tf.constant(values(batch, positions, rows, seed=2)),
    )


def gradients_of(use: Tied) -> np.ndarray:
    """Float64 `[batch, rows, width]`."""
    as_output = np.einsum("btv,btd->bvd", use.logit_cotangents, use.hidden, dtype=np.float64)
    one_hot = np.eye(use.num_rows)[use.row_ids] * use.valid.numpy()[..., np.newaxis]
    return as_output + np.einsum("blv,bld->bvd", one_hot, use.row_cotangents)


@pytest.mark.parametrize("entries", [1, 21, 50, 1000])
@pytest.mark.parametrize("batch", [0, 1, 5, 6])
def test_parts_cover_every_example(
    monkeypatch: pytest.MonkeyPatch, entries: int, batch: int
) -> None:
    """From one example at a time to all at once."""
    monkeypatch.setattr(numerics, "PART_ENTRIES", entries)
    use = random_use(batch, lookups=5, positions=2)
    norms = tf.function(lambda: use.squared_norms(), autograph=False)()
    np.testing.assert_allclose(norms, (gradients_of(use) ** 2).sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("lookups", [0, 1, 9])
@pytest.mark.parametrize("positions", [0, 1, 2])
def test_norms_and_clipped_sum(lookups: int, positions: int) -> None:
    use = random_use(4, lookups, positions)
    factors = np.random.default_rng(1).random(4).astype(np.float32)
    gradients = gradients_of(use)
    squared = (gradients**2).sum((1, 2))
    np.testing.assert_allclose(use.squared_norms(), squared, rtol=1e-5, atol=1e-12)
    total = use.clipped_sum(tf.constant(factors))
    assert total.dtype == tf.float64
    np.testing.assert_allclose(total, np.tensordot(factors, gradients, 1), atol=1e-5)


def test_joining_lookups_with_an_output_copies_no_logits() -> None:
    lookups, output = random_use(4, 3, 0), random_use(4, 0, 2)
    for parts in ([lookups, output], [output, lookups]):
        whole = joined(parts)
        assert whole.logit_cotangents is output.logit_cotangents
        assert whole.row_cotangents is lookups.row_cotangents


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("scale", [1e-8, 1.0])
def test_terms_that_cancel_are_not_taken_for_nothing(scale: float, positions: int) -> None:
    """As a table and as a matrix the gradients of one row cancel but for a little."""
    hidden = np.full((1, positions, 2), 1000.0 / positions, np.float32)
    logits = np.zeros((1, positions, 5), np.float32)
    logits[..., 3] = 1.0
    rows = -1000.0 * np.ones((1, 1, 2), np.float32) + np.float32(scale)
    use = Tied(
        5,
        tf.constant([[3]], tf.int64),
        tf.constant([[True]]),
        *map(tf.constant, (rows, hidden, logits)),
    )
    [norm] = np.sqrt(use.squared_norms())
    exact = np.linalg.norm(hidden[0].sum(0).astype(np.float64) + rows[0, 0])
    assert norm >= exact
    assert norm <= max(exact, 2 * 1000 * math.sqrt(2) / 1000) * 1.01


def test_memory_is_far_below_batch_times_rows_times_width() -> None:
    code = """
        import os
        os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
        import tensorflow as tf
        from benchmarks.clipping import added_memory
        from dp_sparse.clipping.uses.tied import Tied

        batch, rows, width, lookups = 64, 40_009, 16, 3
        for positions in (1, 2):
            ids = tf.zeros([batch, lookups], tf.int64)
            shapes = [(batch, lookups, width), (batch, positions, width), (batch, positions, rows)]
            use = Tied(rows, ids, tf.ones_like(ids, tf.bool), *map(tf.ones, shapes))
            step = tf.function(lambda: (use.squared_norms(), use.clipped_sum(tf.ones([batch]))))
            step()
            print(added_memory(step) / (4 * batch * rows * width))
    """
    shares = [float(line) for line in run_python(code).split()]
    assert len(shares) == 2 and all(0 < share < 0.25 for share in shares)
