"""Clipping whole models: random ones, sensitivity, examples that are not finite, precision."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.clipping.clipped_sums import scaled
from dp_sparse.clipping.gradient_terms import Explicit
from tests.clipping.brute_force import assert_as_brute_force, clipped


def random_model(seed: int, lookups: int, nested: bool, shared: bool) -> keras.Model:
    """Ids and numbers; one or two tables; dense, normalised; maybe a model inside the model."""
    keras.utils.set_random_seed(seed)
    ids, numbers = keras.Input((lookups,), dtype="int32"), keras.Input((3,))
    table = keras.layers.Embedding(5, 3, mask_zero=bool(seed % 2))
    other = table if shared else keras.layers.Embedding(5, 3)
    rows = [keras.layers.LayerNormalization()(table(ids)), other(ids)]
    hidden = keras.layers.Concatenate()([*map(keras.layers.Flatten(), rows), numbers])
    inner = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.LayerNormalization()])
    if nested:
        hidden = inner(hidden)
    else:
        for layer in inner.layers:
            hidden = layer(hidden)
    return keras.Model([ids, numbers], keras.layers.Dense(2)(hidden))


def batch(size: int, lookups: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(1, 5, (size, lookups)).astype(np.int32),
        rng.normal(size=(size, 3)).astype(np.float32),
    ]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 5),
    lookups=st.integers(1, 4),
    nested=st.booleans(),
    shared=st.booleans(),
    weighted=st.booleans(),
    data=st.data(),
)
def test_random_models(
    seed: int, size: int, lookups: int, nested: bool, shared: bool, weighted: bool, data: Any
) -> None:
    padding = data.draw(st.integers(0, size))
    model = random_model(seed, lookups, nested, shared)
    x = batch(size, lookups, seed)
    assert_as_brute_force(model, x, seed=seed, weighted=weighted, padding=padding, tolerance=2e-5)


def test_a_subclassed_model() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(5, 3)
            self.tower = [keras.layers.Dense(4, "relu"), keras.layers.Dense(2)]

        def call(self, inputs: Any, training: bool = False) -> Any:
            ids, numbers = inputs
            hidden = tf.concat([tf.reduce_sum(self.table(ids), axis=1), numbers], axis=1)
            for layer in self.tower:
                hidden = layer(hidden)
            return hidden

    model = Model()
    x = batch(4, 3)
    model([x[0][:1], x[1][:1]])
    assert_as_brute_force(model, x, weighted=True)


def flat(sums: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.ravel() for part in sums]).astype(np.float64)


@pytest.mark.cases(3)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 50.0])
def test_one_example_moves_the_clipped_sum_by_at_most_the_clip_norm(
    policy: str, clip_norm: float
) -> None:
    """Removed, zeroed out, or with a weight of 1e6: ‖S(D) − S(D′)‖ ≤ C2 up to rounding."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = random_model(1, 3, nested=True, shared=True)
    finally:
        keras.config.set_dtype_policy(previous)
    x, y = batch(5, 3), np.ones(5, np.float32)
    weights = np.array([1, 1e6, 1, 1e-3, 1], np.float32)
    whole = flat(clipped(model, x, y, clip_norm, weights=weights).sums)
    for i in range(5):
        present = np.ones(5, np.float32)
        present[i] = 0
        without = flat(clipped(model, x, y, clip_norm, present, weights).sums)
        kept = np.arange(5) != i
        removed = [part[kept] for part in x]
        shorter = flat(clipped(model, removed, y[kept], clip_norm, weights=weights[kept]).sums)
        slack = 1e-5 * 5 * clip_norm + clip_norm * 1e-6
        assert np.linalg.norm(whole - without) <= clip_norm + slack
        rounding = 1e-4 if policy == "float32" else 5e-2  # shorter batches may round otherwise
        assert np.linalg.norm(shorter - without) <= rounding * clip_norm


def test_a_single_example_never_exceeds_the_clip_norm() -> None:
    model = random_model(2, 2, nested=False, shared=False)
    for scale in (1e-6, 1.0, 1e6):
        x = batch(1, 2)
        result = clipped(model, x, np.array([scale], np.float32), 0.5)
        norm = np.linalg.norm(flat(result.sums))
        assert norm <= 0.5 * (1 + 1e-5)
        if result.norms[0] > 0.5:
            assert norm == pytest.approx(0.5, rel=1e-4)


def test_no_real_example_gives_exact_zeros() -> None:
    model = random_model(3, 2, nested=True, shared=True)
    result = clipped(model, batch(3, 2), np.ones(3, np.float32), 1.0, present=[0, 0, 0])
    assert all(not part.any() for part in result.sums)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "overflow"])
def test_a_non_finite_example_is_zeroed_exactly(bad: float | str) -> None:
    """The others' sums are those of a batch in which it is padding, bit for bit.

    One has a finite loss and gradient whose squared norm overflows float32.
    """
    model = random_model(4, 2, nested=True, shared=True)
    x, y = batch(4, 2), np.ones(4, np.float32)
    broken = [x[0], x[1].copy()]
    if bad == "overflow":
        y[2] = 1.5e18
    else:
        broken[1][2, 0] = bad
    result = clipped(model, broken, y, 1.0)
    assert result.finite.tolist() == [True, True, False, True]
    expected = clipped(
        model, x, np.where(result.finite, y, 1).astype(np.float32), 1.0, [1, 1, 0, 1]
    )
    for ours, theirs in zip(result.sums, expected.sums, strict=True):
        assert np.all(np.isfinite(ours))
        np.testing.assert_array_equal(ours, theirs)


def test_a_loss_that_is_not_finite_zeroes_an_example_whose_gradient_is() -> None:
    variable, gradients = keras.Variable(np.zeros(2, np.float32)), tf.constant([[1.0, 0], [0, 2]])
    for bad in (np.nan, np.inf):
        terms = [(variable, Explicit(gradients))]
        result = scaled(terms, 10.0, tf.constant([bad, 1.0]), tf.ones(2))
        np.testing.assert_array_equal(result.dense_sums()[id(variable)], [0, 2])
        assert result.finite.numpy().tolist() == [False, True]


def test_nan_padding_adds_exact_zeros() -> None:
    model = random_model(4, 2, nested=True, shared=True)
    x, y = batch(3, 2), np.ones(3, np.float32)
    x[1][1] = np.nan
    result = clipped(model, x, y, 1.0, present=[1, 0, 1])
    assert all(np.all(np.isfinite(part)) for part in result.sums)


def test_mixed_bfloat16_is_near_brute_force() -> None:
    """Records are float32 before norms and sums; the layers themselves compute in bfloat16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = random_model(5, 3, nested=True, shared=False)
    finally:
        keras.config.set_dtype_policy("float32")
    assert_as_brute_force(model, batch(4, 3), tolerance=5e-2)
