"""One hostile example cannot move a clipped sum by more than C through float32: tiny times huge,
cancelling positions, and rows that cancel."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.clipping.gradient_terms import Product, Rows

CLIP = 1.0
OTHERS = 8


def moved(term: Product | Rows, others_only: Product | Rows) -> float:
    """‖clipped sum with the hostile example − without‖, in units of C."""
    variable = keras.Variable(np.zeros((1, 1), np.float32))
    sums = []
    for records in (term, others_only):
        batch = records.cotangents.shape[0]
        found = clipping.scaled([(variable, records)], CLIP, tf.zeros(batch), tf.ones(batch))
        rows = found.row_sums({id(variable): tf.constant(1)})
        [total] = (rows or found.dense_sums()).values()
        sums.append(total.numpy().astype(np.float64))
    return float(np.linalg.norm(sums[0] - sums[1])) / CLIP


def with_and_without(x: np.ndarray, dz: np.ndarray) -> tuple[Product, Product]:
    """A hostile example before ordinary ones of the same shapes."""
    rng = np.random.default_rng(0)
    ordinary = [
        rng.normal(size=(OTHERS, *values.shape)).astype(np.float32) * 0.1 for values in (x, dz)
    ]
    x, dz = x.astype(np.float32)[None], dz.astype(np.float32)[None]
    both = [np.concatenate([h, o]) for h, o in zip((x, dz), ordinary, strict=True)]
    return Product(*map(tf.constant, both)), Product(*map(tf.constant, ordinary))


@pytest.mark.parametrize("positions", [(), (1,)])
@pytest.mark.parametrize("tiny", [1e-19, 1e-22, 1e-38])
def test_tiny_inputs_times_huge_cotangents(tiny: float, positions: tuple[int, ...]) -> None:
    """Without an axis of positions the norm is a product of norms, of which one vanishes."""
    huge = min(1e19, 1 / tiny)
    x, dz = np.full((*positions, 4096), tiny), np.full((*positions, 1), huge)
    assert moved(*with_and_without(x, dz)) <= CLIP * 1.001


@pytest.mark.parametrize("apart", [1e-5, 1e-7])  # by so much of themselves, at C by 1/apart
@pytest.mark.parametrize("magnitude", [1e1, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("width_out", [1, 64])
def test_positions_that_cancel(magnitude: float, width_out: int, apart: float) -> None:
    direction = np.random.default_rng(1).normal(size=64)
    x = magnitude * np.stack([direction, -direction * (1 + apart)])
    dz = np.ones((2, width_out))
    assert moved(*with_and_without(x, dz)) <= CLIP * 1.01


@pytest.mark.parametrize("apart", [0.0, 1e-7])
@pytest.mark.parametrize("magnitude", [1e3, 1e10, 1e17])
def test_rows_that_cancel(magnitude: float, apart: float) -> None:
    """What is left of terms that are nearly equal may be less than what rounds them when scaled."""
    ids, valid = tf.zeros([OTHERS + 1, 2], tf.int64), tf.ones([OTHERS + 1, 2], tf.bool)
    dz = np.full((OTHERS + 1, 2, 64), 0.25, np.float32)
    terms = magnitude * np.random.default_rng(2).normal(size=64)
    dz[0] = terms, -terms * (1 + apart)
    places = tf.zeros([OTHERS + 1, 2], tf.int32)
    term = Rows(ids, valid, tf.constant(dz)).restricted(places, tf.constant([0], tf.int64))
    without = Rows(ids[1:], valid[1:], tf.constant(dz[1:])).restricted(
        places[1:], tf.constant([0], tf.int64)
    )
    assert moved(term, without) <= CLIP * 1.001


@pytest.mark.parametrize("tiny", [1e-19, 1e-22])
def test_tiny_inputs_at_several_positions(tiny: float) -> None:
    x, dz = np.full((2, 4096), tiny), np.full((2, 64), 0.1 / tiny)
    assert moved(*with_and_without(x, dz)) <= CLIP * 1.001


@pytest.mark.parametrize("near", [1e16, 9.9e16, 1.5e17, 3e17, 1e19, 1.8446743e19])
def test_a_last_bit_near_overflow_switches_no_example_on_or_off(near: float) -> None:
    """A test for finite norms would drop all of these examples, or none, by a last bit."""
    variable = keras.Variable(np.zeros((1, 1), np.float32))
    sums = []
    for value in (np.float32(near), np.nextafter(np.float32(near), np.float32(np.inf))):
        term = Product(tf.ones([OTHERS, 1]), tf.fill([OTHERS, 1], value))
        found = clipping.scaled([(variable, term)], CLIP, tf.zeros(OTHERS), tf.ones(OTHERS))
        sums.append(float(found.dense_sums()[id(variable)][0, 0]))
    assert abs(sums[0] - sums[1]) < 1e-5
    assert sums[0] == pytest.approx(OTHERS * np.clip(2 - near / 1e17, 0, 1), rel=1e-4)
