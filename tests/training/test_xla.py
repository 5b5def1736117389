"""Steps compiled by XLA: graph mode's numbers, one compilation, checks that still refuse."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dp_sparse
from dp_sparse import noise
from dp_sparse.clipping.gradient_terms import squares
from dp_sparse.core import xla
from dp_sparse.core.errors import PrivacyError
from dp_sparse.core.xla import grouped, lower_bound
from dp_sparse.selection import threshold
from dp_sparse.step import forward_backward
from models import classifiers, vision
from tests.reference.distributions import SIGNIFICANCE, chi_square
from tests.training_cases import (
    CHOOSING,
    click_model,
    clicks,
    plan_for,
    selected_rows,
    weights_of,
    without_preflight,
)

VOCABULARIES = (40, 25)


METHODS: dict[str, Callable[..., Any]] = {
    **CHOOSING,
    "lazy": lambda model, plan: dp_sparse.LazyDPSGDOptimizer("sgd", plan, 0.5),
    "shuffled": lambda model, plan: shuffled(plan),
    "exponential": lambda model, plan: dp_sparse.ExponentialSelectionOptimizer(
        "adagrad",
        with_selection(plan, sum(w.shape[0] for w in model.weights if "emb" in w.path)),
        0.5,
    ),
}


def shuffled(plan: Any) -> Any:
    """Always the same permutations, so that weights can be compared."""
    optimizer = dp_sparse.ShuffledDPSGDOptimizer("adam", plan, 0.5, 1.0)
    optimizer.use_noise_key(tf.constant([123, 456], tf.int64))
    return optimizer


def with_selection(plan: Any, rows: int) -> Any:
    """All rows are selected, so that what is computed with them does not depend on chance."""
    return dataclasses.replace(plan, mechanism=dp_sparse.ExponentialSelection(rows))


def bag_model() -> keras.Model:
    """Several lookups an example in one table, some masked, and a one-hot feature."""
    words, user = keras.Input((5,), dtype="int32"), keras.Input((1,), dtype="int32")
    text = keras.layers.Embedding(VOCABULARIES[0], 3, mask_zero=True)(words)
    rows = keras.layers.Embedding(VOCABULARIES[1], 4)(user)
    features = [keras.layers.GlobalAveragePooling1D()(text), keras.layers.Flatten()(rows)]
    output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(features))
    return keras.Model({"words": words, "user": user}, output)


def bags(count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    words = rng.integers(0, VOCABULARIES[0], (count, 5)).astype(np.int32)
    user = rng.integers(0, VOCABULARIES[1], (count, 1)).astype(np.int32)
    return {"words": words, "user": user}, rng.integers(0, 2, count).astype(np.float32)


def trained(make_model: Any, make: Any, data: Any, loss: Any, jit: bool) -> tuple[Any, Any]:
    keras.utils.set_random_seed(0)
    model, plan = make_model(), plan_for(len(data[1]), steps=3)
    model.compile(make(model, plan), loss, metrics=["accuracy"], jit_compile=jit)
    assert model.optimizer.compiles == jit
    history = model.fit(plan.sampling.batches(data), epochs=3, steps_per_epoch=1, verbose=0)
    return weights_of(model), history.history


def assert_same(one: Any, other: Any) -> None:
    for left, right in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    for name, values in one[1].items():
        np.testing.assert_allclose(values, other[1][name], atol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["clicks", "bags"])
def test_without_noise_it_is_graph_mode(method: str, kind: str) -> None:
    cases = {
        "clicks": (lambda: click_model(VOCABULARIES), clicks(12, VOCABULARIES)),
        "bags": (bag_model, bags(12)),
    }
    make_model, data = cases[kind]
    both = [trained(make_model, METHODS[method], data, "mse", jit) for jit in (False, True)]
    assert_same(*both)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("adafest", [False, True])
def test_a_table_of_which_no_row_was_selected(adafest: bool) -> None:
    def make(model: keras.Model, plan: Any) -> Any:
        names = [each.name for each in model.layers if isinstance(each, keras.layers.Embedding)]
        sizes = dict(zip(names, VOCABULARIES, strict=True))
        rows = dp_sparse.SelectedRows.public({names[0]: [], names[1]: [0, 3, 9]}, sizes)
        if adafest:
            return dp_sparse.DPAdaFESTOptimizer("sgd", plan, 0.5, threshold=0.9, rows=rows)
        return dp_sparse.DPFESTOptimizer("sgd", plan, 0.5, rows)

    data = clicks(12, VOCABULARIES)
    make_model = lambda: click_model(VOCABULARIES)  # noqa: E731
    assert_same(*(trained(make_model, make, data, "mse", jit) for jit in (False, True)))


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn", "lstm", "transformer"])
def test_classifiers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[tf.Graph] = []
    monkeypatch.setattr(xla, "_refuse_dropped", kernels.append)
    make_model = getattr(classifiers, name)
    model, rng = make_model(), np.random.default_rng(0)
    shape, classes = model.input_shape[1:], model.output_shape[-1]
    if name == "transformer":
        x: Any = rng.integers(1, 1000, (6, *shape)).astype(np.int32)
    else:
        x = rng.normal(size=(6, *shape)).astype(np.float32)
    data = x, rng.integers(0, classes, 6)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert_same(*(trained(make_model, METHODS["dpsgd"], data, loss, j) for j in (False, True)))
    assert kernels and not [found for graph in kernels for found in varying(graph)]


def with_lora() -> keras.Model:
    model = click_model(VOCABULARIES)
    for layer in model.layers:
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
    return model


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(
    ("make_model", "clipping"),
    [
        (lambda: click_model(VOCABULARIES), dp_sparse.QuantileClipping(target_quantile=0.5)),
        (lambda: click_model(VOCABULARIES), dp_sparse.PerLayerClipping()),
        (lambda: click_model(VOCABULARIES), dp_sparse.AutomaticClipping()),
        (with_lora, dp_sparse.FlatClipping()),
    ],
)
def test_clipping_styles_and_lora(make_model: Any, clipping: Any) -> None:
    def method(model: keras.Model, plan: Any) -> Any:
        return dp_sparse.DPSGDOptimizer("sgd", plan, 0.5, clipping=clipping)

    data = clicks(12, VOCABULARIES)
    assert_same(*(trained(make_model, method, data, "mse", jit) for jit in (False, True)))


@pytest.mark.slow
def test_streams() -> None:
    """Batches in order, the last ones padded; the same as in graph mode and as often compiled."""
    data, found = clicks(10, VOCABULARIES), []
    for jit in (False, True):
        keras.utils.set_random_seed(0)
        model = click_model(VOCABULARIES)
        stream = dp_sparse.StreamSampling(num_examples=10, batch_size=4, passes=2)
        plan = dataclasses.replace(plan_for(10, noise_multiplier=1e-6), sampling=stream)
        model.compile(METHODS["dpsgd"](model, plan), "mse", metrics=["mae"], jit_compile=jit)
        rows = tf.data.Dataset.from_tensor_slices(data)
        history = model.fit(stream.batches(rows), verbose=0)
        assert int(model.optimizer.steps_spent) == stream.steps
        found.append((weights_of(model), history.history))
    assert_same(*found)


@pytest.mark.slow
def test_several_steps_an_execution() -> None:
    model, plan = click_model(VOCABULARIES), plan_for(8, steps=6)
    model.compile(METHODS["adafest"](model, plan), "mse", jit_compile=True, steps_per_execution=3)
    model.fit(plan.sampling.batches(clicks(8, VOCABULARIES)), verbose=0)
    assert int(model.optimizer.steps_spent) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("name", ["resnet18", "vgg16"])
def test_vision(name: str) -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(3, 32, 32, 3)).astype(np.float32), rng.integers(0, 10, 3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    make = lambda: getattr(vision, name)((32, 32, 3))  # noqa: E731
    assert_same(*(trained(make, METHODS["dpsgd"], data, loss, jit) for jit in (False, True)))


@pytest.mark.slow
def test_batches_of_any_size_take_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clicks(60, VOCABULARIES)
    model, plan = click_model(VOCABULARIES), plan_for(60, expected_batch_size=20, steps=12)
    in_one_kernel, made = forward_backward.in_one_kernel, []
    monkeypatch.setattr(
        forward_backward, "in_one_kernel", lambda *given: made.append(1) or in_one_kernel(*given)
    )
    model.compile(METHODS["adafest"](model, plan), "mse", jit_compile=True)
    model.fit(plan.sampling.batches((x, y)), epochs=3, steps_per_epoch=4, verbose=0)
    assert len(made) == 1
    assert int(model.optimizer.steps_spent) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "value", "message"),
    [("x", 99, r"Expected ids in \[0, 40\)"), ("y", 7.0, r"Expected labels in \[0, 1\]")],
)
def test_bad_values_are_refused_and_nothing_is_updated(
    where: str, value: float, message: str
) -> None:
    x, y = clicks(8, VOCABULARIES)
    model, plan = click_model(VOCABULARIES), plan_for(8, noise_multiplier=1.0)
    (x if where == "x" else y)[3] = value
    model.compile(METHODS["adafest"](model, plan), "binary_crossentropy", jit_compile=True)
    before = weights_of(model)
    # The preflight runs in graph mode and would be the first to find it.
    without_preflight(model)
    with pytest.raises(dp_sparse.BadExampleError, match=message):
        model.fit(plan.sampling.batches((x, y)), steps_per_epoch=1, verbose=0)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations) == int(model.optimizer.diagnostics.steps) == 0


@pytest.mark.slow
def test_more_false_rows_than_there_is_room_for_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threshold, "most_skips", lambda *given: 2)
    x, y = clicks(8, VOCABULARIES)
    model, plan = click_model(VOCABULARIES), plan_for(8, noise_multiplier=1.0)
    model.compile(METHODS["adafest"](model, plan), "mse", jit_compile=True)
    before = weights_of(model)
    with pytest.raises(dp_sparse.PrivacyError, match="More rows than the 2 that XLA"):
        model.fit(plan.sampling.batches((x, y)), steps_per_epoch=1, verbose=0)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_batches_of_unknown_size_are_refused() -> None:
    model, plan = click_model(VOCABULARIES), plan_for(8)
    model.compile(METHODS["adafest"](model, plan), "mse", jit_compile=True)
    again = plan.sampling.batches(clicks(8, VOCABULARIES)).unbatch().batch(8)
    with pytest.raises(PrivacyError, match="fixed size with jit_compile=True"):
        model.fit(again, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["sgd", "adagrad", "adam"])
def test_what_fills_up_a_choice_is_never_updated(wrapped: str) -> None:
    """A threshold that nothing reaches: tables stay bit for bit, whatever the noise."""
    x, y = clicks(8, VOCABULARIES)
    for rows in (None, "selected"):
        model, plan = click_model(VOCABULARIES), plan_for(8, noise_multiplier=1.0)
        chosen = selected_rows(model) if rows else None
        optimizer = dp_sparse.DPAdaFESTOptimizer(wrapped, plan, 1.0, threshold=1e9, rows=chosen)
        model.compile(optimizer, "mse", jit_compile=True)
        before = weights_of(model)
        model.fit(plan.sampling.batches((x, y)), steps_per_epoch=2, verbose=0)
        for old, new in zip(before[:2], weights_of(model)[:2], strict=True):
            np.testing.assert_array_equal(old, new)
        assert np.sum(optimizer.diagnostics.rows) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adafest", "adafest_plus"])
def test_every_updated_row_is_a_survivor_and_comes_once(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = clicks(16, VOCABULARIES)
    model, plan = click_model(VOCABULARIES), plan_for(16, noise_multiplier=0.3)
    optimizer = METHODS[method](model, plan)
    model.compile(optimizer, "mse", jit_compile=True)
    applied, release = [], type(optimizer).release

    def watched(self: Any, *given: Any) -> Any:  # the update takes these rows, and no other
        noisy = release(self, *given)
        for table, rows in noisy.tables:
            tf.py_function(
                lambda ids, n=table.shape[0]: applied.append((n, ids.numpy())), [rows.indices], []
            )
        return noisy

    monkeypatch.setattr(type(optimizer), "release", watched)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=4, verbose=0)
    assert len(applied) == 8 and any(len(ids) for _, ids in applied)
    for num_rows, ids in applied:
        assert np.all(np.diff(ids) > 0) and np.all((ids >= 0) & (ids < num_rows))
        assert method == "adafest" or np.all(ids % 2 == 0)  # the selection's


def test_norms_of_long_rows_are_not_too_small() -> None:
    """A few large entries, then so many small ones that float32 sums would lose them."""
    values = np.full((1, 2**20), 2.0**-12.005, np.float32)
    values[0, :64] = 1.0
    exact = np.sum(np.square(values.astype(np.float64)))
    given = tf.constant(values)
    found = tf.function(lambda: xla.compiled(lambda: squares(given)))()
    assert float(found[0]) >= exact * (1 - 1e-6)


# Inputs that XLA wants as constants: one that depends on data makes it compile every step anew.
CONSTANTS = {
    "ArgMax": [1],
    "BroadcastTo": [1],
    "ConcatV2": [-1],
    "Cumsum": [1],
    "DenseBincount": [1],
    "ExpandDims": [1],
    "Fill": [0],
    "GatherV2": [2],
    "Max": [1],
    "OneHot": [1],
    "Pad": [1],
    "PadV2": [1],
    "Range": [0, 1, 2],
    "Reshape": [1],
    "ScatterNd": [2],
    "Slice": [1, 2],
    "Split": [0],
    "SplitV": [1, 2],
    "StatelessRandomUniformFullIntV2": [0],
    "StridedSlice": [1, 2, 3],
    "Sum": [1],
    "Tile": [1],
    "TopKV2": [1],
    "Transpose": [1],
    "UnsortedSegmentMin": [2],
    "UnsortedSegmentSum": [2],
}


KNOWN = ("Shape", "ShapeN", "Size", "Rank", "While")


def from_data(tensor: tf.Tensor) -> bool:
    """Whether values that are fed or read decide it, and not shapes alone; loops are left out."""
    upstream, seen = [tensor], set()
    while upstream:
        each = upstream.pop()
        operation = each.op
        if operation.name in seen or operation.type in KNOWN:
            continue
        if operation.type in ("Placeholder", "ReadVariableOp"):
            return True
        seen.add(operation.name)
        upstream.extend(operation.inputs)
    return False


def varying(graph: tf.Graph) -> list[str]:
    """Operations of which a wanted constant is not known when the graph is built."""
    return [
        f"{operation.type} {operation.name}"
        for operation in graph.get_operations()
        for index in CONSTANTS.get(operation.type, [])
        if from_data(operation.inputs[index])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_is_compiled_once_whatever_the_data(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = click_model(VOCABULARIES), plan_for(8, noise_multiplier=1.0)
    model.compile(METHODS[method](model, plan), "binary_crossentropy", jit_compile=True)
    kernels: list[tf.Graph] = []
    monkeypatch.setattr(xla, "_refuse_dropped", kernels.append)
    model.fit(plan.sampling.batches(clicks(8, VOCABULARIES)), steps_per_epoch=1, verbose=0)
    assert len(kernels[-1].get_operations()) > 100
    assert not [found for graph in kernels for found in varying(graph)]


def test_a_slice_at_a_place_from_the_data_is_found() -> None:
    @tf.function
    def sliced(values: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
        return values[place]

    graph = sliced.get_concrete_function(tf.zeros([3]), tf.constant(1)).graph
    assert [each.split()[0] for each in varying(graph)] == ["StridedSlice", "StridedSlice"]


class Asserting(keras.layers.Layer):
    """Refuses large ids by an assertion, as users write it."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x < 5), [x])]):
            return tf.identity(x)


@pytest.mark.slow
def test_assertions_that_xla_would_drop_are_refused() -> None:
    x, y = clicks(8, VOCABULARIES)
    inputs = keras.Input((2,), dtype="int32")
    model = keras.Model(inputs, click_model(VOCABULARIES)(Asserting()(inputs)))
    plan = plan_for(8)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse", jit_compile=True)
    with pytest.raises(ValueError, match="without assertions of its own.*asserting"):
        model.fit(plan.sampling.batches((x % 5, y)), steps_per_epoch=1, verbose=0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("probability", [0.002, 0.3])
def test_skips_in_one_chunk_are_binomial(probability: float) -> None:
    trials, key = 300, noise.NoiseKey()

    @tf.function
    def run(_: tf.Tensor) -> tf.Tensor:
        draw = key.next_draw()
        hits = xla.compiled(lambda: threshold.geometric_skips(draw, trials, probability))
        return tf.math.count_nonzero(hits < trials)

    found = tf.map_fn(run, tf.zeros([3000]), fn_output_signature=tf.int64).numpy()
    assert chi_square(found, stats.binom(trials, probability)) > SIGNIFICANCE
    assert chi_square(found, stats.binom(trials, 1.3 * probability)) < SIGNIFICANCE


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_groups_and_bounds(elements: list[int], seed: int) -> None:
    values = tf.constant(elements, tf.int64)
    sought = tf.constant(np.random.default_rng(seed).integers(-2, 15, 9))

    @tf.function
    def run() -> Any:
        def both() -> Any:
            groups = grouped(values, 99)
            return groups.values, groups.places, lower_bound(groups.values, sought)

        return xla.compiled(both)

    found, places, below = (tensor.numpy() for tensor in run())
    distinct = np.unique(elements)
    expected = np.concatenate([distinct, np.full(len(elements) - len(distinct), 99)])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[places], elements)
    np.testing.assert_array_equal(below, np.searchsorted(expected, sought))


def refused(optimizer: Any, match: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=match):
        click_model().compile(optimizer, "mse", jit_compile=True, **settings)


def test_what_has_no_static_shapes_is_refused() -> None:
    plan = plan_for(8)
    parts = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0, microbatch_size=4)
    refused(parts, "jit_compile=False with microbatch_size")
    eager = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0)
    refused(eager, "jit_compile=False with run_eagerly=True", run_eagerly=True)


@pytest.mark.slow
def test_a_saved_model_is_compiled_again(tmp_path: pathlib.Path) -> None:
    x, y = clicks(8, VOCABULARIES)
    model, plan = click_model(VOCABULARIES), plan_for(8)
    model.compile(METHODS["dpsgd"](model, plan), "mse", jit_compile=True)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.compiles
    assert model.evaluate(x, y, verbose=0) == pytest.approx(loaded.evaluate(x, y, verbose=0))
