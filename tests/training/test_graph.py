"""Nothing of a table's size in the graph of a DP-AdaFEST step, nor in memory; and it is freed."""

import dataclasses
import gc
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from tests.subprocesses import run_python
from tests.training_cases import clicks, marked, marked_dataset, plan_for, without_preflight

ROWS, WIDTH = 49_999, 3  # more than any other tensor of the step has elements (noise: 2¹⁴)


def step_graph(make: Any, **arguments: Any) -> tf.Graph:
    """The graph of one private step of a model with two tables."""
    x, y = clicks(8, (ROWS, 11))
    model, plan = two_tables(), plan_for(8, capacity=10, noise_multiplier=0.5)
    if make is dp_sparse.ExponentialSelectionOptimizer:
        plan = dataclasses.replace(plan, mechanism=dp_sparse.ExponentialSelection(4))
    model.compile(optimizer=make(**arguments, plan=plan, clip_norm=1.0), loss="binary_crossentropy")
    batch = marked(plan, x, y)
    without_preflight(model)
    step = tf.function(model.train_step, autograph=False)
    return step.get_concrete_function(batch).graph


def two_tables() -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    tables = [
        keras.layers.Embedding(rows, WIDTH, name=name)(ids[:, index])
        for index, (name, rows) in enumerate((("first", ROWS), ("second", 11)))
    ]
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()(tables))
    return keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))


def graphs(graph: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The graph and all function graphs it calls, branches and compiled functions included."""
    seen = set() if seen is None else seen
    if id(graph) in seen:
        return
    seen.add(id(graph))
    yield graph
    for function in graph._functions.values():
        yield from graphs(function.graph, seen)


def large_tensors(graph: tf.Graph, elements: int) -> list[str]:
    """Outputs of known shape with at least so many elements, handles of variables apart."""
    found = []
    for part in graphs(graph):
        for operation in part.get_operations():
            for tensor in operation.outputs:
                if tensor.shape.is_fully_defined() and math.prod(tensor.shape) >= elements:
                    found.append(f"{operation.type} {operation.name} {tensor.shape}")
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_no_operation_of_the_adafest_step_makes_a_tensor_of_the_tables_size(name: str) -> None:
    optimizer = getattr(keras.optimizers, name)(0.1)
    graph = step_graph(dp_sparse.DPAdaFESTOptimizer, optimizer=optimizer)
    assert len(list(graphs(graph))) > 3
    assert large_tensors(graph, ROWS) == []


def public_rows() -> dp_sparse.SelectedRows:
    sizes = {"first": ROWS, "second": 11}
    return dp_sparse.SelectedRows.public({"first": [1, 5, 900], "second": [2]}, sizes)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (dp_sparse.DPFESTOptimizer, {"rows": public_rows()}),
        (dp_sparse.DPAdaFESTOptimizer, {"rows": public_rows()}),
        (dp_sparse.ExponentialSelectionOptimizer, {}),
        (dp_sparse.LazyDPSGDOptimizer, {}),
    ],
)
def test_nor_does_any_other_flat_step(make: Any, arguments: dict[str, Any]) -> None:
    graph = step_graph(make, optimizer="sgd", **arguments)
    assert large_tensors(graph, ROWS) == []


def test_the_dpsgd_step_does_so_the_test_can_fail() -> None:
    found = large_tensors(step_graph(dp_sparse.DPSGDOptimizer, optimizer="sgd"), ROWS)
    assert any(f"({ROWS}, {WIDTH})" in line for line in found)


def test_the_whole_table_is_never_read() -> None:
    """A read of the variable would be a copy of it after the next scatter."""
    graph = step_graph(dp_sparse.DPAdaFESTOptimizer, optimizer="adagrad")
    reads = [
        operation.name
        for part in graphs(graph)
        for operation in part.get_operations()
        if operation.type == "ReadVariableOp" and operation.outputs[0].shape.rank is None
    ]
    assert reads == []
    gathers = [
        op for part in graphs(graph) for op in part.get_operations() if op.type == "ResourceGather"
    ]
    assert gathers


MEMORY = """
    import sys, threading, time
    import numpy as np, keras, tensorflow as tf
    import dp_sparse
    from tests.training_cases import plan_for

    rows, width, batch = int(sys.argv[1]), int(sys.argv[2]), 256

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    ids = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(rows, width, embeddings_initializer="zeros")
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    plan = plan_for(4096, expected_batch_size=batch, capacity=2 * batch, noise_multiplier=1.0)
    make, inner = getattr(dp_sparse, sys.argv[3]), getattr(keras.optimizers, sys.argv[4])
    optimizer = make(inner(0.1), plan, 1.0)
    model.compile(optimizer=optimizer, loss="mse")
    # The fixed cost of tracing and of TensorFlow's thread pools is paid by a small twin first.
    small = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Embedding(1000, width)(ids)))
    small_plan = plan_for(4096, expected_batch_size=batch, capacity=2 * batch, noise_multiplier=1.0)
    small.compile(optimizer=make(inner(0.1), small_plan, 1.0), loss="mse")
    x = np.random.default_rng(0).integers(0, 1000, 4096).astype(np.int32)
    y = np.zeros(4096, np.float32)
    small.fit(small_plan.sampling.batches((x, y)), steps_per_epoch=5, verbose=0)
    optimizer.build(model.trainable_variables)
    for variable in [*model.variables, *optimizer.variables]:
        if len(variable.shape) == 2 and variable.shape[0] == rows:
            variable.assign(variable + 0.0)  # zero pages become resident
    before, peak, running = resident(), [0], True

    def watch():
        while running:
            peak[0] = max(peak[0], resident())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    x = np.random.default_rng(0).integers(0, rows, 4096).astype(np.int32)
    model.fit(plan.sampling.batches((x, y)), steps_per_epoch=20, verbose=0)
    running = False
    thread.join()
    print((peak[0] - before) / (rows * width * 4))
"""


def growth(rows: int, width: int, private: str, optimizer: str) -> float:
    """Peak growth of the process during training, after build, as a share of the table."""
    return float(run_python(MEMORY, str(rows), str(width), private, optimizer).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_training_a_large_table_takes_no_memory(optimizer: str) -> None:
    """2e6 × 64, 512 MB: less than a tenth of it after build."""
    assert growth(2_000_000, 64, "DPAdaFESTOptimizer", optimizer) < 0.1


@pytest.mark.slow
def test_dpsgd_does_take_memory_so_the_test_can_fail() -> None:
    assert growth(400_000, 64, "DPSGDOptimizer", "SGD") > 0.5


@pytest.mark.slow
def test_training_a_table_of_ten_million_rows_takes_no_memory() -> None:
    assert growth(10_000_000, 64, "DPAdaFESTOptimizer", "Adagrad") < 0.1


def test_a_traced_step_is_forgotten_with_its_model() -> None:
    """TensorFlow keeps the gradient of a sum over replicas, and what it was traced in, for good."""

    def trained() -> None:
        plan = plan_for(8, steps=1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        batches = marked_dataset(plan, np.ones((8, 3), np.float32), np.ones((8, 1), np.float32))
        model.fit(batches, verbose=0)

    def steps() -> int:
        gc.collect()
        graphs = [each for each in gc.get_objects() if isinstance(each, tf.Graph)]
        return sum("one_step_on_data" in getattr(graph, "name", "") for graph in graphs)

    trained()  # functions of the package that are traced once know what they were traced in
    before = steps()
    trained()
    assert steps() == before
