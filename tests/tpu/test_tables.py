"""On a TPU: the update of a step, repeated rows under Adagrad, capacities, noise, speed.

What holds off TPU is shown by tests/distribution/embedding_layers with stand-ins for the engines;
here the engines themselves are asked the same.
"""

import dataclasses
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import dp_sparse
from dp_sparse import distribution, noise
from dp_sparse.distribution.embedding_layers.host_step import HostStep
from dp_sparse.distribution.embedding_layers.layer_adapters import layer_of
from dp_sparse.distribution.embedding_layers.training_loop import (
    _Steps,
    build_all,
    distributed_batches,
)
from pipelines.criteo.tables import engine_of
from tests.distribution.embedding_layers import two_tables

pytestmark = pytest.mark.tpu


@dataclasses.dataclass
class Job:
    """A model, its tables and the layer on the TPU, with one batch."""

    model: keras.Model
    tables: distribution.PrivateTables
    layer: Any
    batch: Any

    def values(self) -> dict[str, np.ndarray]:
        copy = distribution.serving_layer(self.tables, self.layer)
        return {table.name: values.numpy() for table, values in copy.embedding_tables.items()}


def job_of(strategy: tf.distribute.TPUStrategy, wrapped: str, **arguments: Any) -> Job:
    with strategy.scope():
        optimizer = two_tables.private_optimizer(wrapped, **arguments)
        tables = two_tables.private_tables(optimizer, strategy=strategy)
        layer = engine_of(strategy, tables)
        model = two_tables.compiled_model(optimizer)
    batches = optimizer.plan.sampling.batches(two_tables.data())
    build_all(model, tables, layer_of(layer, tables), batches.element_spec)
    batch = next(iter(distributed_batches(model, batches.map(HostStep(tables)))))
    return Job(model, tables, layer, batch)


def whole(strategy: tf.distribute.TPUStrategy, batch: Any) -> Any:
    """A shared-out batch as one, on the host."""

    def joined(leaf: Any) -> Any:
        return tf.concat(strategy.experimental_local_results(leaf), 0)

    return {name: tf.nest.map_structure(joined, part) for name, part in batch.items()}


@pytest.mark.parametrize("wrapped", ["sgd", "adagrad"])
def test_the_update_is_a_direct_scatter(strategy: tf.distribute.TPUStrategy, wrapped: str) -> None:
    """Of one step, to 1e-6, on the chosen rows alone; Adagrad squares a row's whole gradient."""
    job = job_of(strategy, wrapped)
    before = job.values()
    expected = two_tables.expected_update(
        job.model, before, two_tables.data(), whole(strategy, job.batch), wrapped=wrapped
    )
    _Steps(job.model, job.tables, layer_of(job.layer, job.tables)).take(job.batch)
    after = job.values()
    for name, table in expected.tables.items():
        np.testing.assert_allclose(after[name], table, atol=1e-6)
        changed = np.flatnonzero((after[name] != before[name]).any(1))
        np.testing.assert_array_equal(changed, np.sort(expected.chosen[name]))


def test_a_full_capacity_is_taken(strategy: tf.distribute.TPUStrategy) -> None:
    """Every row chosen, in all tables: nothing overflows, no id is dropped."""
    job = job_of(strategy, "sgd", threshold=-1e6)
    before = job.values()
    _Steps(job.model, job.tables, layer_of(job.layer, job.tables)).take(job.batch)
    for name, table in job.values().items():
        assert (table != before[name]).any(1).all()


def test_noise_of_dense_variables(strategy: tf.distribute.TPUStrategy) -> None:
    """Of one step less what the gradients alone would do; drawn on the host, where float64 is."""
    noise.self_check()
    job = job_of(strategy, "sgd", noise_multiplier=1.0)
    tables, before = job.values(), [v.numpy() for v in job.model.trainable_variables]
    batch = whole(strategy, job.batch)
    expected = two_tables.expected_update(
        job.model, tables, two_tables.data(), batch, wrapped="sgd"
    )
    _Steps(job.model, job.tables, layer_of(job.layer, job.tables)).take(job.batch)
    after = [v.numpy() for v in job.model.trainable_variables]
    steps = zip(before, after, expected.dense, strict=True)
    left = np.concatenate([(2 * (b - a) - g / two_tables.SIZE).ravel() for b, a, g in steps])
    optimizer = job.tables.private_optimizer
    deviation = two_tables.CLIP * optimizer.gradient_noise_multiplier / two_tables.SIZE
    assert stats.kstest(left, "norm", (0, deviation)).pvalue > 1e-6


def test_training_runs_to_its_end(strategy: tf.distribute.TPUStrategy) -> None:
    job = job_of(strategy, "adagrad", steps=20)
    history = distribution.train_tables(
        job.model, job.tables, job.layer, two_tables.data(), epochs=2
    )
    assert np.isfinite(history.history["loss"]).all()
    assert int(job.model.optimizer.steps_spent.numpy()) == 20
    assert int(job.model.optimizer.diagnostics.examples) == 20 * two_tables.SIZE


def test_throughput(strategy: tf.distribute.TPUStrategy) -> None:
    """Printed, not judged: examples a second of one table of a million rows, batch 16,384."""
    batch, rows, steps = 16_384, 1_000_000, 60
    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(8.0, 1e-6), dp_sparse.StreamSampling(batch * steps, batch, 1)
    ).calibrate()
    with strategy.scope():
        optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(0.1), plan, 1.0)
        table = two_tables.E.TableConfig(rows, 64, combiner="sum", name="table")
        features = {"id": two_tables.E.FeatureConfig(table, name="id")}
        tables = distribution.PrivateTables(features, optimizer, strategy=strategy)
        layer = engine_of(strategy, tables)
        inputs = keras.Input((64,), name="id")
        outputs = keras.layers.Dense(1, activation="sigmoid")(inputs)
        model = keras.Model({"id": inputs}, outputs)
        model.compile(optimizer, loss="binary_crossentropy")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, batch * steps)
    source = tf.data.Dataset.from_tensor_slices(({"id": ids}, rng.integers(0, 2, len(ids)) * 1.0))
    ends: list[float] = []  # of steps
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda index, logs: ends.append(time.perf_counter())
    )
    distribution.train_tables(model, tables, layer, source, callbacks=[clock])
    assert int(optimizer.steps_spent.numpy()) == steps == len(ends)
    print(f"{batch * (steps - 10) / (ends[-1] - ends[9]):.0f} examples a second")
