"""Models and losses that keep what they saw, in places that no noise covers."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.attacks.entries import MEASURED, REFUSED, Entry
from tests.attacks.measuring import Problem
from tests.attacks.towers import WIDTH, Made, numbers, tower
from tests.attacks.ways import SEVERAL, measured

ALL = ("graph", "eager", "xla")
_FILE = os.path.join(tempfile.gettempdir(), "dp_sparse_attacks.txt")
_KEPT: list[Any] = []  # what the attack made last: a variable, a table, a list
_SEEN: list[np.ndarray] = []  # what Python code was handed


def kept(_: Any = None) -> Sequence[Any]:
    return [np.array(value) for value in _KEPT]


def seen(_: Any = None) -> Sequence[Any]:
    return [np.sum([np.sum(value) for value in _SEEN])] if _SEEN else [0.0]


def keep(value: Any) -> Any:
    _KEPT[:] = [value]
    _SEEN.clear()
    return value


class RunningMeanLoss(keras.losses.Loss):
    """Divides by a running mean of its own, in a Keras variable."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keep(keras.Variable(1.0, trainable=False))

    def call(self, y_true: Any, y_pred: Any) -> Any:
        losses = keras.ops.sum(keras.ops.square(y_pred - y_true), axis=-1)
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(losses))
        return losses


class VariableLoss(keras.losses.Loss):
    """The same in a variable of TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keep(tf.Variable(1.0, trainable=False))

    def call(self, y_true: Any, y_pred: Any) -> Any:
        losses = tf.reduce_sum(tf.square(y_pred - y_true), axis=-1)
        self.mean.assign_add(tf.reduce_mean(losses))
        return losses


class Writes(keras.layers.Layer):
    """Writes the sum of its inputs where `write` says."""

    def __init__(self, make: Callable[["Writes"], Any], write: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._make, self._write = make, write
        self.place = keep(make(self))

    def call(self, values: Any) -> Any:
        self._write(self.place, tf.reduce_sum(values))
        return values


def weight(layer: keras.layers.Layer) -> keras.Variable:
    return layer.add_weight(shape=(), initializer="zeros", trainable=False, name="statistic")


def tf_variable(layer: keras.layers.Layer) -> tf.Variable:
    return tf.Variable(0.0, trainable=False)


def under_a_condition(place: Any, total: Any) -> None:
    """Writes inside a branch, where a look at the outermost graph alone sees nothing."""
    tf.cond(total > -1e9, lambda: place.assign_add(total), lambda: place + 0.0)


def inside_a_function(place: Any, total: Any) -> None:
    @tf.function
    def write(total: Any) -> None:
        place.assign_add(total)

    write(total)


def in_a_loop(place: Any, total: Any) -> None:
    tf.while_loop(
        lambda i: i < 1,
        lambda i: (tf.identity(i + 0 * tf.cast(place.assign_add(total), tf.int32)) + 1,),
        (0,),
    )


def scattered(place: Any, total: Any) -> None:
    place.scatter_nd_add([[0]], total[None])


class Table(keras.layers.Layer):
    """Inserts what it saw into a mutable hash table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        _KEPT.clear()
        _SEEN.clear()

    def call(self, values: Any) -> Any:
        key = tf.zeros([1], tf.int64)
        self.table.insert(key, self.table.lookup(key) + tf.reduce_sum(values)[None])
        return values


def of_table(model: keras.Model) -> Sequence[Any]:
    tables = [layer.table for layer in model.layers if isinstance(layer, Table)]
    return [table.export()[1].numpy().sum() for table in tables]


def python_side(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(values: Any) -> Any:
        with tf.control_dependencies([call(values)]):
            return tf.identity(values)

    return apply


def remember(values: Any) -> None:
    _SEEN.append(np.array(values))


def by_py_function(values: Any) -> Any:
    keep(0.0)
    return tf.py_function(remember, [values], [])


def by_numpy_function(values: Any) -> Any:
    keep(0.0)
    return tf.numpy_function(lambda v: remember(v) or np.float32(0), [values], tf.float32)


def printed(values: Any) -> Any:
    return tf.print("sum", tf.reduce_sum(values), output_stream=f"file://{_FILE}")


def written_to_a_file(values: Any) -> Any:
    text = tf.strings.as_string(tf.reduce_sum(values))
    return tf.io.write_file(_FILE, text)


class BatchInAnAttribute(keras.layers.Layer):
    """The fallback calls it again on one example, while it still has a tensor of the batch."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def remember(self, values: Any) -> Any:
        self.batch = values
        return values

    def call(self, values: Any) -> Any:
        return self.scale * values * self.batch


class Remembering(keras.layers.Layer):
    """Hands its inputs to another layer behind Keras' back."""

    def __init__(self, other: BatchInAnAttribute) -> None:
        super().__init__()
        self._other = [other]

    def call(self, values: Any) -> Any:
        return self._other[0].remember(values)


def batch_in_an_attribute() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    layer = BatchInAnAttribute()
    values = keras.ops.sum(layer(Remembering(layer)(inputs)), axis=1, keepdims=True)
    return keras.Model(inputs, values)


class Queues(keras.layers.Layer):
    """Puts the batch's mean into a queue, for whoever takes it out."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = tf.queue.FIFOQueue(1000, [tf.float32], [[]])

    def call(self, values: Any) -> Any:
        with tf.control_dependencies([self.queue.enqueue(tf.reduce_mean(values))]):
            return tf.identity(values)


def of_queue(model: keras.Model) -> Sequence[Any]:
    queues = [layer.queue for layer in model.layers if isinstance(layer, Queues)]
    return [sum(q.dequeue().numpy() for _ in range(q.size().numpy())) for q in queues]


def moving_average(layer: Any) -> Any:
    return layer.add_weight(shape=(1,), initializer="zeros", trainable=False)


def writing(make: Any, write: Any) -> Problem:
    return Problem(tower(between=Made(lambda: Writes(make, write))), numbers(), state=kept)


add = lambda place, total: place.assign_add(total)  # noqa: E731

ENTRIES = [
    Entry(f"state: {name}", measured(of), REFUSED, ways)
    for name, of, ways in [
        (
            "a running mean in a loss",
            Problem(tower(), numbers(), RunningMeanLoss, state=kept),
            ALL,
        ),
        (
            "a TensorFlow variable in a loss",
            Problem(tower(), numbers(), VariableLoss, state=kept),
            ("graph",),
        ),
        ("a weight that is assigned", writing(weight, add), ("graph",)),
        (
            "a weight's value that is assigned",
            writing(weight, lambda p, t: p.value.assign_add(t)),
            ALL,
        ),
        ("a TensorFlow variable in a layer", writing(tf_variable, add), ALL),
        ("written under a condition", writing(tf_variable, under_a_condition), ("graph",)),
        ("written inside a function", writing(tf_variable, inside_a_function), ("graph",)),
        ("written in a loop", writing(tf_variable, in_a_loop), ("graph",)),
        (
            "a hash table",
            Problem(tower(between=Made(Table)), numbers(), state=of_table),
            ("graph",),
        ),
        ("a queue", Problem(tower(between=Made(Queues)), numbers(), state=of_queue), ("graph",)),
        (
            "py_function",
            Problem(tower(between=python_side(by_py_function)), numbers(), state=seen),
            ("graph",),
        ),
        (
            "numpy_function",
            Problem(tower(between=python_side(by_numpy_function)), numbers(), state=seen),
            ("graph",),
        ),
        (
            "printed into a file",
            Problem(tower(between=python_side(printed)), numbers()),
            ("graph",),
        ),
        (
            "written to a file",
            Problem(tower(between=python_side(written_to_a_file)), numbers()),
            ("graph",),
        ),
        ("a batch in an attribute", Problem(batch_in_an_attribute, numbers(), removed=(0, 1)), ALL),
    ]
] + [
    Entry(
        "state: scattered into a weight",
        measured(writing(moving_average, lambda p, t: scattered(p.value, t))),
        REFUSED,
        apart=SEVERAL,  # where Keras cannot build it
    ),
    Entry(
        "honest: a weight that is read",
        measured(writing(weight, lambda place, total: place + total)),
        MEASURED,
    ),
]
