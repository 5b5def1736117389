"""A release writes nothing, and what it gives is all that an update needs."""

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import noise
from dp_sparse.clipping import ClippedSums, zero_sums
from dp_sparse.optimizers.release import NoisyMeans, noisy_rows
from tests.training_cases import click_model, clicks, plan_for

VOCABULARIES = (40, 25)
STYLES = {"flat": None, "quantile": dp_sparse.QuantileClipping()}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adafest": lambda plan, **style: dp_sparse.DPAdaFESTOptimizer("adagrad", plan, 1.0, **style),
    "dpsgd": lambda plan, **style: dp_sparse.DPSGDOptimizer("adam", plan, 1.0, **style),
    "lazy": lambda plan, **style: dp_sparse.LazyDPSGDOptimizer(
        keras.optimizers.SGD(0.1), plan, 1.0, **style
    ),
    "shuffled": lambda plan, **style: dp_sparse.ShuffledDPSGDOptimizer(
        "adam", plan, 1.0, 3.0, **style
    ),
}


def trained(name: str, style: str) -> tuple[keras.Model, ClippedSums]:
    """A model with a built optimizer, and sums of its variables: of each table the rows 1 and 2."""
    plan = plan_for(8, steps=5, noise_multiplier=1.0, capacity=8)
    model = click_model(VOCABULARIES)
    model.compile(OPTIMIZERS[name](plan, clipping=STYLES[style]), "mse")
    model.fit(plan.sampling.batches(clicks(8, VOCABULARIES)), steps_per_epoch=1, verbose=0)
    tables = model.optimizer.tables
    dense = [v for v in model.trainable_variables if all(v is not table for table in tables)]
    rows = [tf.constant([1, 2], tf.int64) for _ in tables]
    return model, zero_sums(dense, tables, rows)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_release_writes_nothing(name: str, style: str) -> None:
    model, sums = trained(name, style)
    optimizer, key = model.optimizer, noise.NoiseKey()
    before = [np.array(v) for v in (*model.variables, *optimizer.variables)]

    @tf.function(autograph=False)
    def release() -> list[tf.Tensor]:
        return optimizer.release(sums, key.next_draw()).tensors()

    released = release()
    assert all(np.all(np.isfinite(each)) for each in released)
    for old, variable in zip(before, (*model.variables, *optimizer.variables), strict=True):
        np.testing.assert_array_equal(old, variable)
    kinds = {op.type for op in release.get_concrete_function().graph.get_operations()}
    assert not {kind for kind in kinds if re.search("Assign|ResourceScatter", kind)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_follows_from_the_release_alone(name: str, style: str) -> None:
    """Two updates by one release, from equal states, end in equal states.

    Nothing else is drawn, but for permutations, which follow from the key.
    """
    model, sums = trained(name, style)
    optimizer = model.optimizer
    noisy = optimizer.release(sums, noise.NoiseKey().next_draw())
    variables = [*model.variables, *optimizer.variables]
    before = [np.array(v) for v in variables]
    after = []
    for _ in range(2):
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
        tf.function(lambda: optimizer.update(noisy), autograph=False)()
        after.append([np.array(v) for v in variables])
    for first, second in zip(*after, strict=True):
        np.testing.assert_array_equal(first, second)
    moved = [not np.array_equal(old, new) for old, new in zip(before, after[0], strict=True)]
    assert sum(moved[: len(model.trainable_variables)]) == len(model.trainable_variables)
    assert (noisy.unclipped is None) == (style == "flat")


def test_noisy_rows_keep_their_ids_and_shapes(no_noise: None) -> None:
    slices = [
        tf.IndexedSlices(tf.reshape(tf.range(6.0), [3, 2]), tf.constant([0, 5, 9], tf.int64)),
        tf.IndexedSlices(tf.ones([0, 4]), tf.zeros([0], tf.int64)),
        tf.IndexedSlices(-tf.ones([1, 3]), tf.constant([7], tf.int64)),
    ]
    found = noisy_rows(slices, 1.0, 2.0, noise.NoiseKey().next_draw())
    for given, rows in zip(slices, found, strict=True):
        np.testing.assert_array_equal(rows.indices, given.indices)
        np.testing.assert_array_equal(rows.values, given.values / 2)
    assert noisy_rows([], 1.0, 2.0, noise.NoiseKey().next_draw()) == []


def test_all_that_is_released_is_named() -> None:
    """What the guard of the update allows: a tensor that was left out would be refused there."""
    mean, unclipped = tf.ones([2]), tf.constant(1.0)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.zeros([1], tf.int64))
    noisy = NoisyMeans([(None, mean)], [(None, rows)], unclipped)
    parts = mean, rows.values, rows.indices, unclipped
    assert [id(t) for t in noisy.tensors()] == [id(t) for t in parts]
