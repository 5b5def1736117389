"""Micro-batches: the same numbers as the whole batch, rows chosen once, noise once, less memory."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core.errors import translated
from dp_sparse.sampling.batch import new_nonce
from dp_sparse.step import metrics
from tests.subprocesses import run_python
from tests.training_cases import (
    click_model,
    clicks,
    marked,
    plan_for,
    weights_of,
    without_preflight,
)

SIZE, VOCABULARIES = 10, (11, 7)


def trained(
    microbatch_size: int | None, make: Any, *, padding: int = 2, **arguments: Any
) -> tuple[keras.Model, dict[str, float]]:
    keras.utils.set_random_seed(0)
    model, plan = click_model(VOCABULARIES), plan_for(SIZE, capacity=SIZE + padding)
    optimizer = make(
        keras.optimizers.Adagrad(0.1),
        plan,
        clip_norm=0.05,
        microbatch_size=microbatch_size,
        **arguments,
    )
    model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy", "auc"])
    x, y = clicks(SIZE + padding, VOCABULARIES)
    present = [1.0] * SIZE + [0.0] * padding
    weights = np.linspace(0.1, 2.0, SIZE + padding).astype(np.float32)
    without_preflight(model)
    step, nonce = tf.function(model.train_step, autograph=False), new_nonce(None)
    for index in range(3):
        logs = step(marked(plan, x, y, index=index, nonce=nonce, present=present, weights=weights))
    return model, {name: float(value) for name, value in logs.items()}


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("size", [1, 3, 4, 10, 100])
@pytest.mark.parametrize("make", [dp_sparse.DPSGDOptimizer, dp_sparse.DPAdaFESTOptimizer])
def test_the_same_weights_metrics_and_counts_as_the_whole_batch(make: Any, size: int) -> None:
    arguments = {} if make is dp_sparse.DPSGDOptimizer else {"threshold": 0.5}
    whole, logs = trained(None, make, **arguments)
    parts, logs_of_parts = trained(size, make, **arguments)
    for one, other in zip(weights_of(whole), weights_of(parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert logs_of_parts == pytest.approx(logs, rel=1e-4)
    for name in ("examples", "clipped", "not_finite"):
        counts = [getattr(m.optimizer.diagnostics, name).numpy() for m in (whole, parts)]
        assert counts[0] == counts[1]
    np.testing.assert_array_equal(
        whole.optimizer.diagnostics.rows, parts.optimizer.diagnostics.rows
    )


@pytest.mark.parametrize("size", [1, 2])
def test_records_of_a_part_must_lead_with_the_part(size: int) -> None:
    """In each batch, whether or not a check takes it."""
    fold = keras.layers.Lambda(lambda x: tf.reshape(x, [-1, 3]), output_shape=(3,))
    back = keras.layers.Lambda(lambda x: tf.reshape(x, [-1, 4, 1]), output_shape=(4, 1))
    inputs = keras.Input((4, 3))
    model, plan = keras.Model(inputs, back(keras.layers.Dense(1)(fold(inputs)))), plan_for(4)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0, microbatch_size=size), loss="mse")
    without_preflight(model)
    before = weights_of(model)
    batch = marked(plan, np.ones((4, 4, 3), np.float32), np.ones((4, 4, 1), np.float32))
    with pytest.raises(dp_sparse.PrivacyError, match="to be the first axis of what"), translated():
        tf.function(model.train_step, autograph=False)(batch)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_rows_are_chosen_over_the_whole_batch() -> None:
    """A row below τ in every part, above it in the batch, survives."""
    plan = plan_for(8, noise_multiplier=1e-4)
    ids = keras.Input((1,), dtype="int32")
    row = keras.layers.Flatten()(keras.layers.Embedding(5, 2)(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(row))
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.SGD(0.1), plan, clip_norm=1.0, threshold=5.0, microbatch_size=2
    )
    model.compile(optimizer=optimizer, loss="mse")
    before = np.array(model.trainable_variables[0])
    x = np.array([[1]] * 6 + [[2]] * 2, np.int32)
    model.train_step(marked(plan, x, np.ones((8, 1), np.float32)))
    changed = np.any(np.array(model.trainable_variables[0]) != before, axis=1)
    np.testing.assert_array_equal(changed, [False, True, False, False, False])


def test_the_first_pass_computes_ids_alone() -> None:
    """Also with a loss that compares shapes when the step runs, for which it needs all outputs."""
    ids = keras.Input((1,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(3)(keras.layers.Embedding(5, 2)(ids)))
    plan = plan_for(8, expected_batch_size=4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0, microbatch_size=2), loss)
    zeros = np.zeros((8, 1), np.int32)
    batch = next(iter(plan.sampling.batches((zeros, zeros))))
    without_preflight(model)
    graph = tf.function(model.train_step, autograph=False).get_concrete_function(batch).graph
    products = {op for op in graph.get_operations() if op.type == "MatMul"}
    assert products and not products & needed(graph)


def needed(graph: Any) -> set[tf.Operation]:
    """What a function runs: its outputs, its writes and checks, and all that these read."""
    found, left = set(), [*graph.control_outputs, *(each.op for each in graph.outputs)]
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += [*op.control_inputs, *(each.op for each in op.inputs)]
    return found


def test_each_part_draws_its_own_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """All examples are equal, so equal masks would give equal gradients."""
    plan = plan_for(4, noise_multiplier=1e-6)
    seen: list[np.ndarray] = []
    update = metrics.update

    def watching(model: keras.Model, batch: Any, outputs: Any, *rest: Any, **options: Any) -> Any:
        tf.py_function(lambda value: seen.append(value.numpy()), [outputs], [])
        return update(model, batch, outputs, *rest, **options)

    monkeypatch.setattr(metrics, "update", watching)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dropout(0.5)]
    )
    optimizer = dp_sparse.DPSGDOptimizer(
        keras.optimizers.SGD(0.0), plan, clip_norm=1.0, microbatch_size=1
    )
    model.compile(
        optimizer=optimizer, loss=lambda y, prediction: tf.reduce_mean(prediction, axis=1)
    )
    without_preflight(model)
    step = tf.function(model.train_step, autograph=False)
    step(marked(plan, np.ones((4, 64), np.float32), np.ones((4, 1), np.float32)))
    assert len(seen) == 4
    assert len({tuple((value[0] == 0).tolist()) for value in seen}) == 4


def test_ids_that_depend_on_random_layers_are_refused() -> None:
    """The places of one pass must not be used for the rows of another."""

    class RandomIds(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seed = keras.random.SeedGenerator(1)

        def call(self, inputs: Any) -> Any:
            return keras.random.randint(tf.shape(inputs), 0, 1000, seed=self.seed)

    x = keras.Input((2,))
    rows = keras.layers.Flatten()(keras.layers.Embedding(1000, 2)(RandomIds()(x)))
    model, plan = keras.Model(x, keras.layers.Dense(1)(rows)), plan_for(6)
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0, microbatch_size=3)
    model.compile(optimizer=optimizer, loss="mse")
    without_preflight(model)
    batch = marked(plan, np.ones((6, 2), np.float32), np.ones((6, 1), np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="changed between two passes"):
        tf.function(model.train_step, autograph=False)(batch)


@pytest.mark.parametrize("bad", [0, -1, 2.5, "8"])
def test_bad_sizes(bad: Any) -> None:
    with pytest.raises(ValueError, match="microbatch_size"):
        dp_sparse.DPSGDOptimizer("sgd", plan_for(8), clip_norm=1.0, microbatch_size=bad)


def test_the_configuration_keeps_it() -> None:
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan_for(8), 1.0, microbatch_size=4)
    assert type(optimizer).from_config(optimizer.get_config()).microbatch_size == 4


def test_a_whole_float_is_a_size() -> None:
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan_for(8), 1.0, microbatch_size=4.0)
    assert isinstance(optimizer.microbatch_size, int)
    assert optimizer.examples_in_memory == 4


MEMORY = """
    import sys
    import keras, numpy as np
    import dp_sparse
    from tests.training_cases import marked, plan_for

    size, microbatch = int(sys.argv[1]), int(sys.argv[2]) or None
    plan = plan_for(size, noise_multiplier=1.0)
    layers = [keras.layers.Dense(2000, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dense(1)])
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, 1.0, microbatch_size=microbatch)
    model.compile(optimizer=optimizer, loss="mse")
    batches = iter([
        marked(plan, np.ones((size, 20), np.float32), np.ones((size, 1), np.float32))
    ])
    model.make_train_function()
    model.train_function(batches)
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            print(int(line.split()[1]) * 1024)
"""


def peak(size: int, microbatch: int) -> int:
    return int(run_python(MEMORY, str(size), str(microbatch)).splitlines()[-1])


@pytest.mark.slow
def test_a_batch_of_any_size_takes_the_memory_of_a_part() -> None:
    """16,384 examples of 4 x 2,000 activations are 0.5 GB, several times over; 256 are 8 MB."""
    small, large, whole = peak(512, 256), peak(16_384, 256), peak(16_384, 0)
    assert large - small < 0.2 * (whole - small)
    assert whole - small > 5e8
