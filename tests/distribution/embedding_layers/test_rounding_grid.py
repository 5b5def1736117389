"""Gradients and noise are on a grid that float32 adds exactly, so no low bit tells them apart."""

import math
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dp_sparse import noise
from dp_sparse.clipping import Rows
from dp_sparse.distribution.embedding_layers import device_step, layer_adapters
from dp_sparse.distribution.embedding_layers.host_step import HostStep
from dp_sparse.distribution.embedding_layers.rounding_grid import RoundingGrid
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import SparseCore
from tests.reference.distributions import SIGNIFICANCE


def grid(**changed: Any) -> RoundingGrid:
    given = {"clip_norm": 1.0, "deviation": 0.8, "batch": 100.0, "examples": 160, "slack": 4.0}
    return RoundingGrid(**{**given, **changed})


@given(st.integers(1, 10**6), st.floats(1e-3, 1e3), st.floats(1e-2, 10.0))
@settings(max_examples=200, deadline=None)
def test_every_sum_is_exact(examples: int, clip_norm: float, sigma: float) -> None:
    points = grid(
        examples=examples,
        clip_norm=clip_norm,
        deviation=sigma * clip_norm,
        batch=examples / 2,
        slack=0.0,
    )
    assert math.frexp(points.step)[0] == 0.5  # a power of two
    largest = (examples * clip_norm + 9.1 * sigma * clip_norm) / points.batch
    assert largest / points.step <= 2**24
    assert points.step <= 2**-6 * max(sigma, examples * 2**-16) * clip_norm / points.batch


@given(st.integers(0, 2**31 - 1), st.sampled_from([1e-6, 1e-3, 1e-2]))
@settings(max_examples=30, deadline=None)
def test_rounding_is_unbiased_and_within_a_step(seed: int, size: float) -> None:
    points, rng = grid(), np.random.default_rng(seed)
    values = (size * rng.normal(size=(50, 4))).astype("float32")
    rounded = points.rounded(tf.constant(values), tf.constant([seed, 1])).numpy()
    assert (rounded / points.step == np.round(rounded / points.step)).all()
    assert np.abs(rounded - values).max() <= 1.005 * points.step
    again = points.rounded(tf.fill([40_000], size), tf.constant([seed, 2])).numpy()
    error = points.step / 2 / math.sqrt(40_000)
    assert abs(again.mean() - size) < 6 * error
    assert (points.rounded(tf.zeros([100]), tf.constant([seed, 3])).numpy() == 0).all()


def test_a_rounded_example_stays_within_the_clip_norm() -> None:
    """Four rows of two entries: the worst that `slack` allows."""
    points = grid(slack=math.sqrt(8), examples=10**5, batch=5e4)
    share = points.clip_norm_before_rounding / points.batch / math.sqrt(8)
    for seed in range(20):
        rows = points.rounded(tf.fill([4, 2], share), tf.constant([seed, 0])).numpy()
        assert points.batch * np.linalg.norm(rows) <= points.clip_norm
    assert points.rounding_share > 1e-3


def test_a_step_clips_to_what_leaves_room_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = two_tables.private_tables(two_tables.private_optimizer())
    activations = {feature.name: tf.zeros([1, two_tables.WIDTH]) for feature in tables.features}
    layer = SimpleNamespace(look_up=lambda *_: SimpleNamespace(activations=activations))
    passed = SimpleNamespace(terms=[], losses=tf.zeros([1]))
    monkeypatch.setattr(device_step, "_backward", lambda *_: passed)
    monkeypatch.setattr(device_step, "real_examples", lambda examples: examples)
    monkeypatch.setattr(device_step, "refuse_nan", lambda model, examples: examples)
    clip_norms = []

    def noted(terms: Any, clip_norm: float, *_: Any) -> None:
        clip_norms.append(clip_norm)
        raise NotImplementedError  # nothing else of the step is wanted

    monkeypatch.setattr(device_step.clipping, "scaled", noted)
    batch = {"features": {}, "id_weights": {}, "examples": tf.ones([1])}
    with pytest.raises(NotImplementedError):
        device_step.sums_of(None, tables, layer, batch, None)
    assert clip_norms == [tables.grid.clip_norm_before_rounding]
    assert clip_norms[0] < two_tables.CLIP


@pytest.mark.parametrize("good", [True, False])
def test_what_a_step_hands_over_is_on_the_grid_and_once_a_row(good: bool) -> None:
    """Of one example, whose two features look up one row of a table; nothing if a check failed."""
    tables = two_tables.private_tables(two_tables.private_optimizer())
    width, draw, terms = two_tables.WIDTH, noise.NoiseKey().next_draw(), []
    for table in tables.tables:
        lookups = sum(feature.most_ids for feature in table.features)
        cotangents = tf.random.stateless_normal([1, lookups, width], [1, 2])
        ids = tf.zeros([1, lookups], tf.int64)
        terms.append((table, Rows(ids, tf.ones_like(ids, tf.bool), cotangents), tf.constant([0.5])))
    shared = next(table for table in tables.tables if len(table.features) == 2)
    on_grid = {table.path: tf.fill([1, width], 3 * tables.grid.step) for table in tables.tables}
    batch = {"first": {shared.path: tf.constant([[0, 0]])}, "noise": on_grid}
    activations = {feature.name: tf.zeros([1, width]) for feature in tables.features}
    found = SimpleNamespace(terms=terms)
    sent = device_step._output_gradients(tables, batch, activations, found, tf.constant(good), draw)
    for gradient in sent.values():
        points = gradient.numpy() / tables.grid.step
        np.testing.assert_array_equal(points, np.round(points))
    assert any(np.any(gradient) for gradient in sent.values()) == good
    first, second = (sent[feature.name].numpy() for feature in shared.features)
    (whole,) = (term.cotangents.numpy()[0].sum(0) for t, term, _ in terms if t is shared)
    mean = good * 0.5 * whole / two_tables.SIZE
    np.testing.assert_allclose(first[0], mean, atol=1.01 * tables.grid.step)
    assert not np.any(second)


def test_terms_that_cancel_enter_no_sum() -> None:
    """Two lookups of one row with opposite gradients: the row gets what is left, once."""
    shares = tf.constant([[[1000.0], [-999.0], [5.0]], [[1.0], [2.0], [3.0]]])
    first = tf.constant([[0, 0, 2], [0, 1, 2]])
    found = device_step._once_a_row(shares, first).numpy()[..., 0]
    np.testing.assert_array_equal(found, [[1.0, 0.0, 5.0], [1.0, 2.0, 3.0]])


def test_noise_has_its_distribution() -> None:
    points = grid()
    found = points.noise(tf.constant(np.random.default_rng(0).normal(size=5000))).numpy()
    assert (found / points.step == np.round(found / points.step)).all()
    assert stats.kstest(found, "norm", (0, 0.8 / 100)).pvalue > SIGNIFICANCE
    assert stats.kstest(found, "norm", (0, 1.0 / 100)).pvalue < SIGNIFICANCE


def test_batches_too_large_to_be_exact_are_refused() -> None:
    with pytest.raises(ValueError, match="would cost 48% of clip_norm"):
        grid(examples=10**6, batch=1e6, slack=4.0)


@pytest.mark.slow
def test_all_that_a_step_pushes_is_on_the_grid() -> None:
    """Else a row that noise alone chose would be told from one that an example looked up."""
    optimizer, source = two_tables.private_optimizer(), two_tables.data()
    tables = two_tables.private_tables(optimizer, two_tables.tf_features("mean"))
    engine, pushed = SparseCore(tables.feature_config, two_tables.INITIAL), []
    layer = layer_adapters.SparseCoreLayer(engine)
    look_up = layer.look_up

    def recorded(features: Any, weights: Any) -> layer_adapters.LookedUp:
        found = look_up(features, weights)

        def push(gradients: Any) -> None:
            tf.py_function(lambda *leaves: pushed.extend(leaves), tf.nest.flatten(gradients), [])
            found.push(gradients)

        return layer_adapters.LookedUp(found.activations, push)

    layer.look_up = recorded  # type: ignore[method-assign]
    model = two_tables.compiled_model(optimizer)
    two_tables.take_step(model, tables, layer, source, two_tables.prepared(tables, source))
    assert len(pushed) == len(tables.feature_config)
    for gradient in pushed:
        steps = gradient.numpy() / tables.grid.step
        assert (steps == np.round(steps)).all() and np.abs(steps).max() < 2**24
    assert sum(bool(gradient.numpy().any()) for gradient in pushed) == 5  # of a bag one is 0


@pytest.mark.slow
def test_an_example_whose_lookups_cancel_leaves_sums_exact() -> None:
    """Two features of one table and one id with huge opposite gradients: 1000 C a lookup."""
    optimizer = two_tables.private_optimizer(threshold=-1e6)  # every row is chosen
    tables = two_tables.private_tables(optimizer)
    engine = SparseCore(
        tables.feature_config, two_tables.INITIAL
    )  # which adds in float32, in two orders
    inputs = {name: keras.Input((two_tables.WIDTH,), name=name) for name in two_tables.FEATURES}
    inputs["dense_features"] = keras.Input((2,), name="dense_features")
    difference = (inputs["left"] - inputs["right"]) * inputs["dense_features"][:, :1]
    outputs = keras.layers.Dense(1, activation="sigmoid")(difference)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss="binary_crossentropy")
    x, y = two_tables.data()
    x["right"][0], x["dense_features"][0] = x["left"][0], 1e9
    batches = optimizer.plan.sampling.batches((x, y))
    layer = layer_adapters.SparseCoreLayer(engine)
    batch = next(iter(batches.map(HostStep(tables))))
    two_tables.take_step(model, tables, layer, (x, y), batch)
    assert int(engine.updates) == 1
    assert np.isfinite(engine.tables["shared"].numpy()).all()
