"""State that the variable guard does not see: refused in all ways to train, if it is harmful."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_sparse import (
    DPSGDOptimizer,
    LazyDPSGDOptimizer,
    UnsupportedLayerError,
    check_model,
    distribution,
)
from dp_sparse.clipping.graph_guard import guarded
from dp_sparse.core.errors import PrivacyError
from tests.clipping.guarded_steps import SIZE, Calls, features, model_with, train
from tests.replicas import strategy_of
from tests.training_cases import (
    click_model,
    clicks,
    marked_dataset,
    plan_for,
)

START = [0.0, 0.0, 0.0]
FILE = "file:///nowhere/values"


def variable(layer: keras.layers.Layer) -> tf.Variable:
    return tf.Variable(START)


def weight(layer: keras.layers.Layer) -> keras.Variable:
    return layer.add_weight(shape=(3,), initializer="zeros", trainable=False, name="seen")


def add(layer: Any, inputs: Any) -> None:
    layer.made.assign_add(tf.reduce_sum(inputs, 0))


def around(layer: Any, inputs: Any) -> None:
    """Keras' own scope does not see it."""
    layer.made.value.assign_add(tf.reduce_sum(inputs, 0))


def scatter(layer: Any, inputs: Any) -> None:
    layer.made.scatter_add(tf.IndexedSlices(inputs[:1, 0], [0]))


def part(layer: Any, inputs: Any) -> None:
    layer.made[:1].assign(inputs[0, :1])


def table(layer: Any) -> Any:
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)


def insert(layer: Any, inputs: Any) -> None:
    layer.made.insert(tf.constant([1], tf.int64), inputs[0, :1])


def conditionally(layer: Any, inputs: Any) -> Any:
    def written() -> tf.Tensor:
        add(layer, inputs)
        return inputs

    return tf.cond(tf.reduce_sum(inputs) > -1e9, written, lambda: inputs)


def in_a_loop(layer: Any, inputs: Any) -> Any:
    def body(i: tf.Tensor) -> tf.Tensor:
        add(layer, inputs)
        return i + 1

    tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])


def in_a_function(layer: Any, inputs: Any) -> Any:
    @tf.function
    def inner(values: tf.Tensor) -> tf.Tensor:
        conditionally(layer, values)
        return values + 0.0

    return inner(inputs)


def backwards(layer: Any, inputs: Any) -> Any:
    """The gradient of the gradient's own making."""

    @tf.custom_gradient
    def same(values: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            layer.made.assign_add(tf.reduce_sum(dy, 0))
            return dy

        return tf.identity(values), gradient

    return same(inputs)


def mapped(layer: Any, inputs: Any) -> Any:
    row = tf.vectorized_map(lambda one: tf.random.normal([3]) * one, inputs)
    return tf.ensure_shape(row, [None, 3])


def summary(layer: Any, inputs: Any) -> None:
    with layer.made.as_default(step=0):
        tf.summary.write("values", tf.reduce_sum(inputs))


def writer(layer: Any) -> Any:
    import tempfile

    return tf.summary.create_file_writer(tempfile.mkdtemp())


def normal(inputs: Any, seed: Any) -> tf.Tensor:
    return tf.random.stateless_normal(tf.shape(inputs), seed)


def as_text(inputs: Any) -> tf.Tensor:
    return tf.strings.as_string(inputs[0, 0])


WRITES: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, str]] = {
    "variable": (add, variable, "AssignAddVariableOp"),
    "value of a weight": (around, weight, "AssignAddVariableOp"),
    "rows": (scatter, variable, "ResourceScatterAdd"),
    "slice": (part, variable, "ResourceStridedSliceAssign"),
    "branch": (conditionally, variable, "AssignAddVariableOp"),
    "loop": (in_a_loop, variable, "AssignAddVariableOp"),
    "function": (in_a_function, variable, "AssignAddVariableOp"),
    "table": (insert, table, "LookupTableInsertV2"),
    "queue": (
        lambda layer, x: layer.made.enqueue(x[0, 0]),
        lambda layer: tf.queue.FIFOQueue(99, tf.float32),
        "QueueEnqueueV2",
    ),
    "python": (
        lambda layer, x: tf.ensure_shape(tf.py_function(tf.sin, [x], tf.float32), [None, 3]),
        None,
        "EagerPyFunc",
    ),
    "numpy": (
        lambda layer, x: tf.ensure_shape(
            tf.numpy_function(np.sin, [x], tf.float32, stateful=False), [None, 3]
        ),
        None,
        "PyFuncStateless",
    ),
    "summary": (summary, writer, "WriteSummary"),
    "file": (lambda layer, x: tf.io.write_file("/nowhere", as_text(x)), None, "WriteFile"),
    "print": (lambda layer, x: tf.print(x, output_stream=FILE), None, "PrintV2"),
    "random": (lambda layer, x: x * tf.random.normal(tf.shape(x)), None, "RandomStandardNormal"),
    "generator": (
        lambda layer, x: x * layer.made.normal(tf.shape(x)),
        lambda layer: tf.random.Generator.from_seed(1),
        "RngReadAndSkip",
    ),
    "known seed": (
        lambda layer, x: x * keras.random.normal(tf.shape(x), seed=7),
        None,
        "StatelessRandomGetKeyCounter",
    ),
    "seed of a counter": (
        lambda layer, x: x * normal(x, tf.cast(layer.made[:2], tf.int32)),
        lambda layer: tf.Variable(START),
        "StatelessRandomGetKeyCounter",
    ),
    "seed of old": (
        lambda layer, x: x * normal(x, layer.made),
        lambda layer: tf.constant([3, 4]),
        "StatelessRandomGetKeyCounter",
    ),
    "known seed, philox": (
        lambda layer, x: (
            x * tf.random.stateless_normal(tf.shape(x), [1, 2], alg=tf.random.Algorithm.PHILOX)
        ),
        None,
        "StatelessRandomNormalV2",
    ),
    "seed given to a function": (
        lambda layer, x: x * tf.function(normal)(x, tf.constant([1, 2])),
        None,
        "StatelessRandomNormalV2",
    ),
    "seed of the size": (
        lambda layer, x: x * normal(x, tf.stack([tf.size(x), 3])),
        None,
        "StatelessRandomNormalV2",
    ),
    "seed of a loop's counter": (
        lambda layer, x: tf.map_fn(
            lambda pair: pair[0] * normal(pair[0], tf.stack([pair[1], 7])),
            (x, tf.range(tf.shape(x)[0])),
            fn_output_signature=tf.float32,
        ),
        None,
        "StatelessRandomNormalV2",
    ),
    "random, vectorised": (mapped, None, "RandomStandardNormal"),
    "queue closed": (
        lambda layer, x: layer.made.close(),
        lambda layer: tf.queue.FIFOQueue(9, tf.float32),
        "QueueCloseV2",
    ),
    "time": (lambda layer, x: x + 0 * tf.cast(tf.timestamp(), x.dtype), None, "Timestamp"),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_operation_that_outlives_the_step_is_refused_with_its_layer(name: str) -> None:
    do, make, kind = WRITES[name]
    layer = Calls(do, make)
    with pytest.raises(UnsupportedLayerError, match=rf"does_it.*\({kind}\): \w+ ") as caught:
        train(model_with(layer))
    assert str(caught.value).startswith("Cannot train privately:")
    if isinstance(layer.made, tf.Variable | keras.Variable):
        np.testing.assert_array_equal(np.array(layer.made), START)


def test_one_that_the_backward_pass_makes_is_refused() -> None:
    inputs = keras.Input((3,))
    hidden = Calls(backwards, variable)(keras.layers.Dense(3)(inputs))
    with pytest.raises(UnsupportedLayerError, match="AssignAddVariableOp"):
        train(keras.Model(inputs, keras.layers.Dense(1)(hidden)))


def by_loop(model: keras.Model) -> None:
    with tf.distribute.get_strategy().scope():
        model.compile(DPSGDOptimizer("sgd", plan_for(SIZE), 1.0), loss="mse")
        distribution.train(model, features(), steps_per_epoch=1)


def one_batch(model: keras.Model) -> None:
    plan = plan_for(SIZE)
    model.compile(DPSGDOptimizer("sgd", plan, 1.0), loss="mse", run_eagerly=True)
    model.train_step(next(iter(marked_dataset(plan, *features()))))


def lazily(model: keras.Model) -> None:
    plan = plan_for(SIZE)
    model.compile(LazyDPSGDOptimizer("sgd", plan, 1.0), loss="mse", jit_compile=True)
    model.fit(marked_dataset(plan, *features()), verbose=0)


WAYS: dict[str, Callable[[keras.Model], None]] = {
    "xla": lambda model: train(model, jit_compile=True),
    "micro-batches": lambda model: train(model, microbatch_size=2),
    "eager": lambda model: train(model, run_eagerly=True),
    "eager step": one_batch,
    "loop": by_loop,
    "lazy, by xla": lazily,
}


@pytest.mark.parametrize("way", WAYS)
def test_in_every_way(way: str) -> None:
    layer = Calls(around, weight)
    with pytest.raises(UnsupportedLayerError, match=r"does_it.*\(AssignAddVariableOp\)"):
        WAYS[way](model_with(layer))
    np.testing.assert_array_equal(np.array(layer.made), np.zeros(3))


def test_under_a_strategy() -> None:
    with strategy_of(2).scope():
        layer = Calls(add, on_read)
        with pytest.raises(UnsupportedLayerError, match=r"does_it.*\(AssignAddVariableOp\)"):
            train(model_with(layer))


def on_read(layer: keras.layers.Layer) -> tf.Variable:
    """A variable that every replica writes on its own."""
    return tf.Variable(
        START,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


@pytest.mark.slow
def test_metrics_under_a_strategy() -> None:
    with strategy_of(2).scope():
        train(model_with(keras.layers.Dense(2)), metrics=["mae", keras.metrics.AUC()])


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_replicas_that_meet_in_the_model_are_refused(where: str) -> None:
    """What is isolated on each replica would mix the examples of all."""

    def total(values: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(values))

    def loss(y: Any, prediction: Any) -> tf.Tensor:
        values = tf.reduce_mean(tf.square(y - prediction), -1)
        return values * total(values) if where == "loss" else values

    with strategy_of(2).scope():
        layer = Calls(lambda layer, x: x * total(x) if where == "layer" else x + 0)
        with pytest.raises(PrivacyError, match="an all_reduce, which mixes those of all"):
            train(model_with(layer), loss)


def test_check_model_names_it() -> None:
    [problem] = check_model(model_with(Calls(add, variable))).problems
    assert "does_it" in problem and "(AssignAddVariableOp): keeps what was computed" in problem


def test_functions_that_run_eagerly_are_refused() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(PrivacyError, match=r"run_functions_eagerly\(True\)"):
            train(model_with(keras.layers.Dense(2)))
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.usefixtures("no_noise")
def test_what_python_keeps_from_step_to_step_is_not_used_under_run_eagerly() -> None:
    """The last batch's mean in an attribute, which an eager step would carry along."""

    def keep(layer: Any, inputs: Any) -> Any:
        before, layer.made = layer.made, tf.reduce_mean(inputs, 0)
        return inputs if before is None else inputs - before

    with pytest.raises(PrivacyError, match="a tensor that it kept in Python from an earlier call"):
        train(model_with(Calls(keep)), run_eagerly=True, steps=3)


# ---- What is left alone.


def looked_up(layer: Any) -> Any:
    values = tf.lookup.KeyValueTensorInitializer(tf.range(3, dtype=tf.int64), tf.range(3.0))
    return tf.lookup.StaticHashTable(values, 0.0)


def in_an_array(layer: Any, inputs: Any) -> Any:
    array = tf.TensorArray(tf.float32, 3)
    for i in range(3):
        array = array.write(i, inputs[:, i])
    return tf.transpose(array.stack())


HARMLESS: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "reading": (lambda layer, x: x + layer.made, variable),
    "array": (in_an_array, None),
    "assertion": (lambda layer, x: tf.debugging.assert_all_finite(x, "finite"), None),
    "check": (lambda layer, x: tf.debugging.assert_less(x, 1e9), None),
    "console": (lambda layer, x: tf.print(tf.shape(x)), None),
    "table": (
        lambda layer, x: x + layer.made.lookup(tf.cast(x, tf.int64)),
        looked_up,
    ),
    "loop": (lambda layer, x: tf.map_fn(tf.sin, x), None),
    "vectorised": (lambda layer, x: tf.vectorized_map(tf.sin, x), None),
    "function": (lambda layer, x: tf.function(tf.sin)(x), None),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", HARMLESS)
def test_an_operation_without_effect_is_not_refused(name: str) -> None:
    train(model_with(Calls(*HARMLESS[name])), metrics=["mae"])


@pytest.mark.slow
def test_random_layers_and_loops_of_keras_are_not_refused() -> None:
    layers = [
        keras.layers.GaussianNoise(0.1),
        keras.layers.Dropout(0.5),
        keras.layers.Reshape((3, 1)),
        keras.layers.LSTM(2, dropout=0.1),
        keras.layers.AlphaDropout(0.1),
    ]
    assert check_model(model_with(keras.Sequential(layers))).ok
    train(model_with(keras.Sequential(layers)), metrics=[keras.metrics.AUC()])


def test_noise_that_is_delayed_is_written_before_rows_are_read() -> None:
    model, plan = click_model(), plan_for(SIZE)
    model.compile(LazyDPSGDOptimizer("sgd", plan, 1.0), "mse")
    model.fit(marked_dataset(plan, *clicks(SIZE), steps=2), verbose=0)
    assert int(model.optimizer.diagnostics.steps) == 2


class ReadsATable(keras.layers.Layer):
    """Has a weight of its own, and another layer's by the variable that it was given."""

    def __init__(self, table: Any, in_a_branch: bool = False) -> None:
        super().__init__()
        self.table, self.in_a_branch = table, in_a_branch

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        read = lambda: tf.reduce_sum(self.table[-1])  # noqa: E731
        if self.in_a_branch:
            return inputs * self.scale + tf.cond(tf.size(inputs) > 0, read, lambda: 0.0)
        return inputs * self.scale + read()


@pytest.mark.parametrize("in_a_branch", [False, True])
@pytest.mark.parametrize("optimizer", [DPSGDOptimizer, LazyDPSGDOptimizer])
def test_a_recorded_layer_uses_no_weight_of_another(optimizer: Any, in_a_branch: bool) -> None:
    """Its gradient would be missing, and a row of a table may lack noise that is due."""
    model, plan = click_model(), plan_for(SIZE)
    table = model.trainable_variables[0]
    read = ReadsATable(table.value, in_a_branch)
    model = keras.Model(model.inputs, read(model.outputs[0]))
    model.compile(optimizer("sgd", plan, 1.0), "mse")
    with pytest.raises(UnsupportedLayerError, match=f"uses {table.path} where its gradient"):
        model.fit(marked_dataset(plan, *clicks(SIZE)), verbose=0)


def test_a_function_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @tf.function(autograph=False)
    def step(values: tf.Tensor) -> tf.Tensor:
        with guarded(PrivacyError):
            return tf.cond(values > 0, lambda: values + 1, lambda: values)

    monkeypatch.setattr(tf.Graph, "_get_function", lambda self, name: None)
    with pytest.raises(PrivacyError, match="calls a function that cannot be read"):
        step.get_concrete_function(tf.TensorSpec([]))
