"""Products, lookups and direct gradients: norms and clipped sums from the records."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.clipping.gradient_terms import Explicit, Product, Rows, joined, numerics, product
from dp_sparse.clipping.machine_check import self_check
from tests.clipping.brute_force import values

SIZES = st.integers(1, 6)


@settings(max_examples=50, deadline=None)
@given(SIZES, st.integers(1, 12), SIZES, SIZES)
def test_product_is_the_outer_product_of_each_example(b: int, s: int, d: int, n: int) -> None:
    x, dz, factors = values(b, s, d), values(b, s, n, seed=1), values(b, seed=2)
    gradients = np.einsum("bsd,bsn->bdn", x, dz)
    term = Product(tf.constant(x), tf.constant(dz))
    np.testing.assert_allclose(term.squared_norms(), np.sum(gradients**2, axis=(1, 2)), rtol=1e-4)
    expected = np.einsum("b,bdn->dn", factors, gradients)
    np.testing.assert_allclose(term.clipped_sum(tf.constant(factors)), expected, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, SIZES)
def test_product_without_positions_is_one_position(b: int, d: int, n: int) -> None:
    x, dz = tf.constant(values(b, d)), tf.constant(values(b, n, seed=1))
    factors = tf.constant(values(b, seed=2))
    flat, deep = Product(x, dz), Product(x[:, tf.newaxis], dz[:, tf.newaxis])
    np.testing.assert_allclose(flat.squared_norms(), deep.squared_norms(), rtol=1e-4)
    np.testing.assert_allclose(flat.clipped_sum(factors), deep.clipped_sum(factors), atol=1e-5)
    both, twice = joined([flat, flat]), joined([deep, deep])
    np.testing.assert_allclose(both.squared_norms(), twice.squared_norms(), rtol=1e-4)
    np.testing.assert_allclose(both.squared_norms(), 4 * deep.squared_norms(), rtol=1e-4)


def test_both_formulas_for_a_product_agree() -> None:
    x, dz = values(3, 4, 50), values(3, 4, 70, seed=1)
    term = Product(tf.constant(x), tf.constant(dz))
    by_part = product._squared_norms_by_part(term.inputs, term.cotangents)
    np.testing.assert_allclose(term.squared_norms(), by_part, rtol=1e-5)


@pytest.mark.cases(5)
@pytest.mark.parametrize("entries", [1, 7, 35, 70, 1000])
@pytest.mark.parametrize("batch", [0, 1, 5, 6])
def test_parts_cover_every_example_and_column(
    monkeypatch: pytest.MonkeyPatch, entries: int, batch: int
) -> None:
    """From one column of one example at a time to all at once."""
    monkeypatch.setattr(numerics, "PART_ENTRIES", entries)
    x, dz = values(batch, 3, 7), values(batch, 3, 5, seed=1)
    expected = np.sum(np.einsum("bsd,bsn->bdn", x, dz).astype(np.float64) ** 2, axis=(1, 2))
    by_part = tf.function(product._squared_norms_by_part, autograph=False)
    for norms in (by_part(x, dz), by_part(dz, x)):
        assert norms.shape == (batch,)
        np.testing.assert_allclose(norms, expected, rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(SIZES, st.integers(1, 12), st.integers(1, 4), SIZES, st.integers(0, 99))
def test_repeated_rows_add_before_squaring(
    b: int, lookups: int, rows: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    row_ids, dz = rng.integers(0, rows, (b, lookups)), values(b, lookups, width, seed=seed)
    valid, places = rng.random((b, lookups)) < 0.7, rng.integers(-1, rows, rows)
    factors = values(b, seed=seed + 1)
    term = Rows(tf.constant(row_ids), tf.constant(valid), tf.constant(dz))
    own = tf.constant(places[row_ids].astype(np.int32))
    term = term.restricted(own, tf.constant(np.flatnonzero(places >= 0)))
    gradients = np.zeros((b, rows, width))
    for i in range(b):
        for m in range(lookups):
            if valid[i, m] and places[row_ids[i, m]] >= 0:
                gradients[i, row_ids[i, m]] += dz[i, m]
    np.testing.assert_allclose(
        term.squared_norms(), np.sum(gradients**2, axis=(1, 2)), rtol=1e-4, atol=1e-6
    )
    expected = np.zeros((rows, width))
    for row in range(rows):
        if places[row] >= 0:
            expected[places[row]] += np.einsum("b,bw->w", factors, gradients[:, row])
    total = term.clipped_sum(tf.constant(factors), tf.constant(rows))
    np.testing.assert_allclose(total, expected, atol=1e-4)


def test_row_ids_of_a_billion_rows_do_not_collide() -> None:
    """(example, row) pairs are numbered in int64."""
    row_ids = tf.constant([[10**9 - 1, 0], [10**9 - 1, 10**9 - 1]], tf.int64)
    dz = tf.ones([2, 2, 1])
    term = Rows(row_ids, tf.ones([2, 2], tf.bool), dz)
    np.testing.assert_allclose(term.squared_norms(), [2, 4])


def test_direct_gradients_of_any_rank() -> None:
    for shape in ((), (3,), (2, 3)):
        gradients, factors = values(4, *shape), values(4, seed=1)
        term = Explicit(tf.constant(gradients))
        norms = np.sum(gradients.reshape(4, -1) ** 2, axis=1)
        np.testing.assert_allclose(term.squared_norms(), norms, rtol=1e-5)
        expected = np.tensordot(factors, gradients, axes=1)
        np.testing.assert_allclose(term.clipped_sum(tf.constant(factors)), expected, atol=1e-5)


def test_joined_uses_have_the_norm_of_the_whole_gradient() -> None:
    one, two = (
        Product(tf.constant(values(3, s, 2, seed=s)), tf.constant(values(3, s, 4, seed=9 + s)))
        for s in (1, 3)
    )
    whole = sum(np.einsum("bsd,bsn->bdn", term.inputs, term.cotangents) for term in (one, two))
    term = joined([one, two])
    np.testing.assert_allclose(term.squared_norms(), np.sum(whole**2, axis=(1, 2)), rtol=1e-5)
    direct = joined([Explicit(values(3, 4)), Explicit(values(3, 4, seed=1))])
    expected = np.sum((values(3, 4) + values(3, 4, seed=1)) ** 2, axis=1)
    np.testing.assert_allclose(direct.squared_norms(), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["rows", "direct"])
def test_large_sums_are_not_rounded_by_more_than_an_example_may_move_them(kind: str) -> None:
    """In float32 these 65,537 terms add up to a wrong sum, by more than one of them."""
    count, summand, factors = 65_537, np.float32(0.1), tf.ones([65_537])
    terms = tf.fill([count, 1], summand)
    if kind == "rows":
        ids = tf.zeros([count, 1], tf.int64)
        term = Rows(ids, tf.ones([count, 1], tf.bool), terms[:, tf.newaxis])
        [[total]] = term.restricted(tf.cast(ids, tf.int32), ids[0]).clipped_sum(factors, 1)
    else:
        [total] = Explicit(terms).clipped_sum(factors)
    assert float(total) == pytest.approx(count * float(summand), abs=1e-7)
    in_float32 = np.add.accumulate(terms.numpy()[:, 0])[-1]
    assert abs(in_float32 - count * float(summand)) > summand


def test_norms_of_many_lookups_are_not_rounded_away() -> None:
    count = 60_000
    ids = tf.range(count, dtype=tf.int64)[tf.newaxis]
    term = Rows(ids, tf.ones([1, count], tf.bool), tf.fill([1, count, 1], 1.1))
    [squared] = term.squared_norms().numpy()
    assert squared == pytest.approx(count * float(np.float32(1.1)) ** 2, rel=1e-6)


def test_a_table_that_is_also_a_matrix_is_refused() -> None:
    rows = Rows(tf.zeros([2, 1], tf.int64), tf.ones([2, 1], tf.bool), tf.ones([2, 1, 3]))
    with pytest.raises(ValueError, match=r"used in different ways: \['Product', 'Rows'\]"):
        joined([rows, Product(tf.ones([2, 1, 3]), tf.ones([2, 1, 3]))])


def test_the_self_check_passes_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    self_check()
    monkeypatch.setattr(product.Product, "clipped_sum", lambda term, factors: tf.zeros([7, 3]))
    with pytest.raises(RuntimeError, match="multiplies matrices wrongly"):
        self_check()
