"""What the step computed of its batch reaches the update, or the next step, beside the noise."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from tests.attacks.entries import MIXES, REFUSED, Entry
from tests.attacks.measuring import Problem
from tests.attacks.steering import dense, forget_models, keeping, known, model_that_trains
from tests.attacks.towers import WIDTH, layer, numbers
from tests.attacks.ways import Way, measured

KEPT: dict[str, tf.Tensor] = {}  # tensors that Python code keeps while a step is traced
_OTHERS: list[Any] = []  # a model that trained before, or a metric of it
CLIP = 0.1


class Keeping(keras.metrics.Metric):
    """A metric that keeps what it was given."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        KEPT["metric"] = tf.reduce_mean(y_pred)

    def result(self) -> Any:
        return tf.constant(0.0)


class KeepingModel(keras.Model):
    """A model that keeps what its metrics are given."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        KEPT["model"] = tf.reduce_mean(y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)


class KeepingLast(keras.layers.Layer):
    """A layer that keeps what it was called on last, which is the pass that is released."""

    def call(self, values: Any) -> Any:
        if not isinstance(values, keras.KerasTensor):
            KEPT["layer"] = tf.reduce_mean(values)
        return values


class FromTheFirst(keras.layers.Layer):
    """Takes its scale from the batch it is first called on, as weight normalisation may."""

    def __init__(self) -> None:
        super().__init__()
        self.initialised = False

    def call(self, values: Any, training: bool = False) -> Any:
        if self.initialised or not training:
            return values
        self.initialised = True
        return values / (0.01 + tf.abs(tf.reduce_mean(values)))


def from_the_first() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(1)(FromTheFirst()(inputs)))


class KeptRegularizer(keras.regularizers.Regularizer):
    """Its gradient is what was kept."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, weights: Any) -> Any:
        return KEPT.get(self._name, 0.0) * tf.reduce_sum(tf.convert_to_tensor(weights))

    def get_config(self) -> dict[str, Any]:
        return {"name": self._name}


class KeptConstraint(keras.constraints.Constraint):
    """Moves weights by what was kept."""

    def __call__(self, weights: Any) -> Any:
        return weights + KEPT.get("metric", 0.0)


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that follows from a number."""

    def __init__(self, number: Callable[[], Any]) -> None:
        self._number = number

    def __call__(self, step: Any) -> Any:
        return (1 / CLIP) * (1 + tf.abs(tf.cast(self._number(), tf.float32)))

    def get_config(self) -> dict[str, Any]:
        return {}


def counts() -> tf.Tensor:
    """How many examples were clipped so far, which reports read and no noise covers."""
    model = model_that_trains()
    optimizer = None if model is None else model.optimizer
    return (
        tf.constant(0.0) if optimizer is None else tf.cast(optimizer.diagnostics.clipped, "float32")
    )


def loss_by_counts(y: Any, prediction: Any) -> Any:
    return tf.reduce_sum(tf.square(prediction - y), axis=-1) * (1 + counts())


def of_another_model() -> tf.Tensor:
    return _OTHERS[0].metrics[0].result()


def keeps_itself() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    head = keras.layers.Dense(1, kernel_regularizer=KeptRegularizer("model"))
    return KeepingModel(inputs, head(inputs))


def keeps_last() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    head = keras.layers.Dense(1, kernel_regularizer=KeptRegularizer("layer"))
    return keras.Model(inputs, head(KeepingLast()(inputs)))


def reads_counts() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(1)(layer(lambda v: v * (1 + counts()))(inputs)))


class OwnMetrics(keras.Model):
    """Says itself what its metrics are, as Keras lets a model do."""

    @property
    def metrics(self) -> list[Any]:
        return []


def own_metrics() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return OwnMetrics(inputs, keras.layers.Dense(1)(inputs))


def own_loss() -> Any:
    tracker = getattr(model_that_trains(), "_loss_tracker", None)
    return 0.0 if tracker is None else tracker.result()


def own_loss_by_its_handle() -> Any:
    tracker = getattr(model_that_trains(), "_loss_tracker", None)
    if tracker is None:
        return 0.0
    handle = tf.identity(tracker.total.value.handle)
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def own_loss_by_python() -> Any:
    return tf.py_function(lambda: np.float32(own_loss()), [], tf.float32)


class KeepsCounts(keras.metrics.Metric):
    """Writes into a weight of the model, which Keras takes for its own."""

    def __init__(self) -> None:
        super().__init__(name="keeps")
        self.place: Any = None

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        model = model_that_trains()
        assert model is not None
        self.place = next(v for v in model.variables if "statistic" in v.path)
        self.place.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

    def result(self) -> Any:
        return tf.constant(0.0)


def of_a_model_that_is_gone() -> Any:
    return _OTHERS[0].result()


class StartByTheBatch(keras.layers.Layer):
    """Positions that begin where the batch says, of a table whose rows are still alike."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = keras_hub.layers.PositionEmbedding(16, initializer="zeros")

    def build(self, shape: Any) -> None:
        self.positions.build(shape)

    def call(self, values: Any) -> Any:
        start = tf.math.count_nonzero(values[:, 0, 0] > 0, dtype=tf.int32)
        return self.positions(values, start_index=start)


def starts() -> keras.Model:
    inputs = keras.Input((3, 2))
    return keras.Model(
        inputs, keras.layers.Dense(1)(keras.layers.Flatten()(StartByTheBatch()(inputs)))
    )


def sequences() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = np.abs(rng.normal(size=(8, 3, 2))).astype(np.float32)
    return x, 100 * np.abs(rng.normal(size=(8, 1))).astype(np.float32)


def where_known(values: Any) -> Any:
    """Mixes only where Python sees how many examples there are."""
    return values if values.shape[0] is None else values - 5 * tf.reduce_mean(values, axis=0)


def loss_where_known(y: Any, prediction: Any) -> Any:
    losses = tf.reduce_mean(tf.square(prediction - y), axis=-1)
    return losses if losses.shape[0] is None else losses * (tf.reduce_mean(y) - 100)


def mixes_where_known() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(1)(layer(where_known)(inputs)))


def keeps_rows() -> keras.Model:
    """What is kept was looked up, and reaches the batch through ids alone."""
    ids = keras.Input((2,), dtype="int64")
    rows = KeepingLast()(keras.layers.Embedding(9, 3, embeddings_initializer="normal")(ids))
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))


def ids() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.integers(0, 9, (8, 2)), rng.normal(size=(8, 1)).astype(np.float32)


def reached(
    make: Callable[[], keras.Model],
    wrapped: Any = None,
    metrics: Any = None,
    loss: Any = "mse",
    data: Callable[[], Any] | None = None,
) -> Callable[[Way], float]:
    """A problem in which something kept or read reaches what it should not."""

    def attack(way: Way) -> float:
        KEPT.clear()
        fields = {} if wrapped is None else {"wrapped": wrapped()}
        compiled = {} if metrics is None else {"metrics": [metrics()]}
        problem = Problem(
            known(make), data or numbers(), loss, (1,), CLIP, optimizer=fields, compiled=compiled
        )
        return measured(problem)(way)

    return attack


def after_another(
    attack: Callable[[Way], float], its_model_is_gone: bool = False
) -> Callable[[Way], float]:
    """The same once another model has trained; or was deleted then, but not one of its metrics."""

    def both(way: Way) -> float:
        assert reached(dense())(way) <= 1.001
        model = model_that_trains()
        assert model is not None
        _OTHERS[:] = [model.metrics[0] if its_model_is_gone else model]
        if its_model_is_gone:
            forget_models()
            del model
            gc.collect()
        return attack(way)

    return both


def by(number: Callable[[], Any]) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.SGD(Rate(number))


class WithATable(keras.layers.Layer):
    """A layer with a weight, and with a table by the `tf.Variable` that holds it."""

    def __init__(self, table: tf.Variable) -> None:
        super().__init__()
        self.table = table

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, values: Any) -> Any:
        return values * self.scale + tf.reduce_sum(self.table[:1])


def with_a_table() -> keras.Model:
    inputs = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(9, WIDTH)
    rows = keras.layers.Flatten()(table(inputs))
    return keras.Model(inputs, WithATable(table.embeddings.value)(keras.layers.Dense(1)(rows)))


NOT_NOISED = REFUSED.matching(
    "what no noise covers|a statistic of training without noise|keeps what was computed"
)
_WHERE_KNOWN = [  # they mix where Python sees the size of a batch
    ("a layer", Problem(mixes_where_known, numbers(), removed=(0, 1))),
    ("a loss", Problem(dense(), numbers(), loss_where_known, removed=(0, 1))),
]

ENTRIES = [
    Entry(f"reaching: {name}", attack, NOT_NOISED, ways, elsewhere=False)
    for name, attack, ways in [
        (
            "a metric's tensor in a regulariser",
            reached(dense(kernel_regularizer=KeptRegularizer("metric")), metrics=Keeping),
            ("graph", "eager", "xla", "mirrored", "stream", "train"),
        ),
        (
            "a metric's tensor in a constraint",
            reached(dense(kernel_constraint=KeptConstraint()), metrics=Keeping),
            ("graph",),
        ),
        (
            "a metric's tensor in a schedule",
            reached(dense(), by(lambda: KEPT.get("metric", 0.0)), Keeping),
            ("graph",),
        ),
        ("a model's tensor in a regulariser", reached(keeps_itself), ("graph",)),
        ("a layer's tensor in a regulariser", reached(keeps_last), ("graph",)),
        (
            "looked-up rows in a schedule",
            reached(keeps_rows, by(lambda: 1 + abs(KEPT.get("layer", 0.0))), data=ids),
            ("graph",),
        ),
        ("counts of examples in a schedule", reached(dense(), by(counts)), ("graph", "xla")),
        ("counts of examples in a layer", reached(reads_counts), ("graph", "xla")),
        ("counts of examples in a loss", reached(dense(), loss=loss_by_counts), ("graph", "xla")),
        (
            "another model's training loss in a schedule",
            after_another(reached(dense(), by(of_another_model))),
            ("graph",),
        ),
        (
            "a metric in a schedule whose model is gone",
            after_another(reached(dense(), by(of_a_model_that_is_gone)), its_model_is_gone=True),
            ("graph",),
        ),
        ("a loss that the model does not name", reached(own_metrics, by(own_loss)), ("graph",)),
        ("a metric by its handle", reached(dense(), by(own_loss_by_its_handle)), ("graph",)),
        ("a metric by Python in a schedule", reached(dense(), by(own_loss_by_python)), ("graph",)),
        ("a metric that holds a weight", reached(keeping, metrics=KeepsCounts), ("graph", "xla")),
    ]
] + [
    Entry(name, measured(of), MIXES, ways, elsewhere=False)
    for name, of, ways in [
        (
            "positions that begin where the batch says",
            Problem(starts, sequences, removed=(0, 3)),
            ("graph", "microbatches", "xla", "mirrored"),
        ),
        (
            "a layer that initialises itself from its first batch",
            Problem(from_the_first, numbers(), removed=(0, 1)),
            ("graph", "eager", "xla", "microbatches", "mirrored"),
        ),
    ]
]
ENTRIES += [
    Entry(
        f"{name} that mixes where the batch's size is known", measured(of), MIXES, ("xla",), False
    )
    for name, of in _WHERE_KNOWN
]
ENTRIES += [  # the other ways show no size, or check with it
    Entry(
        f"{name} that would mix if the batch's size were known",
        measured(of),
        dataclasses.replace(MIXES, harmless=True),
        ("graph", "eager", "stream", "train", "mirrored"),
        apart=("xla",),
    )
    for name, of in _WHERE_KNOWN
]
ENTRIES += [
    Entry(
        "a table's tf.Variable in a layer with a weight",
        measured(Problem(with_a_table, ids)),
        REFUSED.matching("where its gradient cannot be recorded"),
        elsewhere=False,
    )
]
