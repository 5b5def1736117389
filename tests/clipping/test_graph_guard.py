"""State that no audit of Keras' variables sees: what is refused, on every road, and what is not."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
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
from dp_sparse.clipping.graph_guard import audited, update_from
from dp_sparse.clipping.unnoised import register_unnoised
from dp_sparse.core.errors import PrivacyError
from tests.replicas import strategy_of
from tests.training_cases import (
    click_model,
    clicks,
    marked_dataset,
    plan_for,
)

SIZE = 6
START = [0.0, 0.0, 0.0]
FILE = "file:///nowhere/values"


def features(width: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SIZE, width)).astype(np.float32), rng.normal(size=SIZE).astype("f")


class Calls(keras.layers.Layer):
    """A layer that does something with its inputs; `build` and `do` share `self`."""

    def __init__(self, do: Callable[..., Any], make: Callable[..., Any] | None = None) -> None:
        super().__init__(name="does_it")
        self._do, self._make, self.made = do, make, None

    def build(self, shape: Any) -> None:
        with tf.init_scope():
            self.made = self._make(self) if self._make is not None else None

    def compute_output_spec(self, inputs: Any) -> Any:
        """Else Keras would call it to learn this."""
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs: Any) -> Any:
        given = self._do(self, inputs)
        return given if tf.is_tensor(given) else inputs


def model_with(layer: keras.layers.Layer, width: int = 3) -> keras.Model:
    return keras.Sequential(
        [keras.Input((width,)), layer, keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )


def train(model: keras.Model, loss: Any = "mse", steps: int = 1, **arguments: Any) -> None:
    """One step or more of DP-SGD by `fit`."""
    microbatch_size = arguments.pop("microbatch_size", None)
    plan = plan_for(SIZE)
    sgd = keras.optimizers.SGD(0.1)
    optimizer = DPSGDOptimizer(sgd, plan, 1.0, microbatch_size=microbatch_size)
    model.compile(optimizer, loss=loss, **arguments)
    model.fit(marked_dataset(plan, *features(), steps=steps), verbose=0)
    assert int(optimizer.diagnostics.steps) == steps


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


ROADS: dict[str, Callable[[keras.Model], None]] = {
    "xla": lambda model: train(model, jit_compile=True),
    "micro-batches": lambda model: train(model, microbatch_size=2),
    "eager": lambda model: train(model, run_eagerly=True),
    "eager step": one_batch,
    "loop": by_loop,
    "lazy, by xla": lazily,
}


@pytest.mark.parametrize("road", ROADS)
def test_on_every_road(road: str) -> None:
    layer = Calls(around, weight)
    with pytest.raises(UnsupportedLayerError, match=r"does_it.*\(AssignAddVariableOp\)"):
        ROADS[road](model_with(layer))
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


@pytest.mark.parametrize("name", HARMLESS)
def test_an_operation_without_effect_is_not_refused(name: str) -> None:
    train(model_with(Calls(*HARMLESS[name])), metrics=["mae"])


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


def test_a_function_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @tf.function(autograph=False)
    def step(values: tf.Tensor) -> tf.Tensor:
        with audited(PrivacyError):
            return tf.cond(values > 0, lambda: values + 1, lambda: values)

    monkeypatch.setattr(tf.Graph, "_get_function", lambda self, name: None)
    with pytest.raises(PrivacyError, match="calls a function that cannot be read"):
        step.get_concrete_function(tf.TensorSpec([]))


# ---- Metrics.


class Rereads(keras.metrics.Metric):
    """Its own sum is its business; it also does something else."""

    def __init__(self, also: Callable[[tf.Tensor], Any] = lambda y: None) -> None:
        super().__init__(name="rereads")
        self._also = also
        self.total = self.add_variable((), initializer="zeros", name="total")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.cast(y, tf.float32)))
        tf.cond(self.total > 1e9, lambda: self.total.assign(0.0), lambda: self.total.assign(1.0))
        self._also(y)

    def result(self) -> Any:
        return self.total


@pytest.mark.parametrize("road", [{}, {"microbatch_size": 2}, {"jit_compile": True}])
def test_metrics_write_their_own_variables(road: dict[str, Any]) -> None:
    train(model_with(keras.layers.Dense(2)), metrics=[Rereads(), "mae"], **road)


@pytest.mark.parametrize("road", [{}, {"microbatch_size": 2}, {"jit_compile": True}])
def test_metrics_write_nothing_else(road: dict[str, Any]) -> None:
    model = model_with(keras.layers.Dense(2))
    kept = model.weights[0]
    metric = Rereads(lambda y: kept.value.assign_add(tf.fill(kept.shape, tf.reduce_sum(y))))
    with pytest.raises(PrivacyError, match=r"\(AssignAddVariableOp\): keeps what was computed"):
        train(model, metrics=[metric], **road)


def test_metrics_run_no_python() -> None:
    metric = Rereads(lambda y: tf.py_function(lambda v: v, [y], tf.float32))
    with pytest.raises(PrivacyError, match=r"\(EagerPyFunc\): runs Python code"):
        train(model_with(keras.layers.Dense(2)), metrics=[metric])


def test_a_metric_read_in_the_forward_pass() -> None:
    metric = Rereads()
    layer = Calls(lambda layer, x: x * (1 + metric.total))
    with pytest.raises(UnsupportedLayerError, match="rereads.*a metric's variable"):
        train(model_with(layer), metrics=[metric])


# ---- What an update may use.


def of_another_function(values: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda: 2 * values, autograph=False)()


def updating(change: Callable[..., Any]) -> tf.types.experimental.ConcreteFunction:
    """A step whose update assigns what `change` makes of allowed data, other data and weights."""
    weights = tf.Variable(tf.ones([3]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        allowed, other = tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)
        with update_from([allowed]):
            weights.assign(change(allowed, other, weights))

    spec = tf.TensorSpec([None, 3])
    return step.get_concrete_function(spec, spec)


@pytest.mark.parametrize(
    "change",
    [
        lambda allowed, other, weights: weights - 0.1 * allowed,
        lambda allowed, other, weights: tf.cond(
            tf.reduce_sum(weights) > 0, lambda: allowed, lambda: -weights
        ),
        lambda allowed, other, weights: of_another_function(allowed),
        lambda allowed, other, weights: tf.constant([1.0, 2.0, 3.0]),
    ],
    ids=["step of SGD", "branch", "function", "constant"],
)
def test_an_update_may_use_what_is_allowed(change: Any) -> None:
    updating(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda allowed, other, weights: weights - 0.1 * other,
        lambda allowed, other, weights: tf.cond(
            tf.reduce_sum(other) > 0, lambda: allowed, lambda: -weights
        ),
        lambda allowed, other, weights: tf.cond(
            tf.reduce_sum(weights) > 0, lambda: allowed, lambda: other
        ),
        lambda allowed, other, weights: of_another_function(other),
        lambda allowed, other, weights: allowed * tf.cast(tf.size(tf.where(other)), tf.float32),
    ],
    ids=["data", "branch on data", "data in a branch", "function", "count"],
)
def test_an_update_may_use_nothing_else(change: Any) -> None:
    with pytest.raises(PrivacyError, match="uses .*, which the step computed of its batch"):
        updating(change)


def test_an_update_names_the_statistic_that_it_reads() -> None:
    model, metric = model_with(keras.layers.Dense(2)), Wide()
    model.compile("sgd", loss="mse", metrics=[metric])
    model.fit(*features(), verbose=0)
    register_unnoised(model, DPSGDOptimizer("sgd", plan_for(SIZE), 1.0).diagnostics)
    with pytest.raises(PrivacyError, match=r"reads wide.*, a statistic of training without noise"):
        updating(lambda allowed, other, weights: weights * metric.result())


def test_an_update_runs_no_python() -> None:
    def python(allowed: Any, other: Any, weights: Any) -> Any:
        python = lambda: tf.py_function(lambda: tf.ones([3]), [], tf.float32)  # noqa: E731
        return tf.ensure_shape(tf.function(python, autograph=False)(), [3])

    with pytest.raises(PrivacyError, match=r"\(EagerPyFunc\): runs Python code"):
        updating(python)


def test_a_step_whose_update_was_read_is_not_kept() -> None:
    graph = weakref.ref(updating(lambda allowed, other, weights: allowed).graph)
    gc.collect()
    assert graph() is None


class Wide(keras.metrics.Metric):
    """A statistic of a shape that nothing else has."""

    def __init__(self) -> None:
        super().__init__(name="wide")
        self.total = self.add_variable((17,), initializer="zeros", name="total")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.fill([17], tf.reduce_sum(tf.cast(y, tf.float32))))

    def result(self) -> Any:
        return self.total[0]


class Measures(keras.Model):
    """Holds a metric itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.own = keras.layers.Dense(1), Wide()

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


@pytest.mark.parametrize("make", [Measures, lambda: model_with(keras.layers.Dense(2))])
def test_no_file_of_weights_has_a_metric(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    model, plan = make(), plan_for(SIZE)
    model(features()[0])
    model.compile(DPSGDOptimizer("sgd", plan, 1.0), loss="mse", metrics=[Wide()])
    callbacks = [
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(tmp_path / "checkpoint.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(tmp_path / "checkpoint.keras"),
    ]
    batches = marked_dataset(plan, *features(), steps=1)
    model.fit(batches, verbose=0, callbacks=callbacks)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".h5", ".keras")]
    assert len(files) == 5
    for path in files:
        assert (17,) not in shapes(path, tmp_path), path
    saved = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    model.export(tmp_path / "export", verbose=False)
    for prefix in (saved, str(tmp_path / "export" / "variables" / "variables")):
        names = tf.train.list_variables(prefix)
        assert names and not [name for name, shape in names if shape == [17]]
    assert [17] in [list(v.shape) for v in model.metrics_variables]


def shapes(path: Path, folder: Path) -> list[tuple[int, ...]]:
    import zipfile

    import h5py

    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            path = Path(archive.extract("model.weights.h5", folder / "extracted"))
    found: list[tuple[int, ...]] = []
    with h5py.File(path) as file:
        file.visititems(lambda _, entry: found.append(getattr(entry, "shape", ())))
    assert len(found) > 4
    return found
