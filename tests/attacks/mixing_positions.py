"""Models that fold positions into the batch axis, or the batch into positions."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.attacks.entries import MEASURED, MIXES, Entry
from tests.attacks.measuring import Problem
from tests.attacks.ways import ONES, measured

LENGTH, WIDTH, EXAMPLES = 8, 3, 6
EVERYWHERE, FEW = ("graph", *ONES), ("one",)


def sequences() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = 3 * rng.normal(size=(EXAMPLES, LENGTH, WIDTH)).astype(np.float32)
    return x, 5 + rng.normal(size=(EXAMPLES, 1)).astype(np.float32)


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Each example has ids of its own, all different."""
    ids = np.arange(EXAMPLES * LENGTH).reshape(EXAMPLES, LENGTH)
    return ids.astype(np.int32), np.full((EXAMPLES, 1), 9, np.float32)


def folded(
    make: Callable[[], keras.layers.Layer], inner: tuple[int, ...] = (WIDTH,)
) -> Callable[[], keras.Model]:
    """Each position goes through all trained layers as if it were an example."""

    def model() -> keras.Model:
        inputs = keras.Input((LENGTH, WIDTH))
        values = make()(keras.ops.reshape(inputs, (-1, *inner)))
        return keras.Model(inputs, pooled(values))

    return model


def pooled(values: Any) -> Any:
    """The mean over the features of all positions, `[batch, 1]`."""
    values = keras.ops.reshape(values, (-1, LENGTH * values.shape[-1]))
    return keras.ops.mean(values, axis=1, keepdims=True)


def embedded() -> keras.Model:
    ids = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.Embedding(EXAMPLES * LENGTH, WIDTH, embeddings_initializer="ones")
    return keras.Model(ids, pooled(table(keras.ops.reshape(ids, (-1,)))))


def embedded_beside_a_lookup() -> keras.Model:
    """As `embedded`, beside an honest lookup in a table of its own."""
    ids = keras.Input((LENGTH,), dtype="int32")
    make = lambda: keras.layers.Embedding(EXAMPLES * LENGTH, WIDTH)  # noqa: E731
    rows = make()(keras.ops.reshape(ids, (-1,)))
    return keras.Model(ids, pooled(rows) + pooled(make()(ids)))


def beside_a_head() -> keras.Model:
    """One layer is folded, another is not."""
    inputs = keras.Input((LENGTH, WIDTH))
    hidden = keras.layers.Dense(4, activation="tanh")(keras.ops.reshape(inputs, (-1, WIDTH)))
    hidden = keras.ops.mean(keras.ops.reshape(hidden, (-1, LENGTH, 4)), axis=1)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def frozen_and_folded() -> keras.Model:
    """Honest: a frozen layer is folded, a trained one is not."""
    inputs = keras.Input((LENGTH, WIDTH))
    frozen = keras.layers.Dense(4, activation="tanh", trainable=False)
    hidden = frozen(keras.ops.reshape(inputs, (-1, WIDTH)))
    hidden = keras.ops.mean(keras.ops.reshape(hidden, (-1, LENGTH, 4)), axis=1)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


class FoldsInside(keras.layers.Layer):
    """Honest: of one example it makes one output, whatever it does inside."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, values: Any) -> Any:
        flat = tf.reshape(values, [-1, WIDTH])
        return tf.reshape(tf.tanh(flat @ self.kernel), [-1, LENGTH, 4])


class Scale(keras.layers.Layer):
    """Has no rule of its own."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, values: Any) -> Any:
        return self.scale * values


def positions_lead(length: int) -> Callable[[], keras.Model]:
    """With as many positions as examples, the first axis looks like the batch."""

    def model() -> keras.Model:
        inputs = keras.Input((length, WIDTH))
        turn = keras.layers.Lambda(lambda v: tf.transpose(v, [1, 0, 2]))
        hidden = turn(keras.layers.Dense(4)(turn(inputs)))
        return keras.Model(inputs, keras.ops.mean(hidden, axis=(1, 2))[:, None])

    return model


def square_data() -> tuple[np.ndarray, np.ndarray]:
    x, y = sequences()
    return x[:, :EXAMPLES], y


def each_twice() -> keras.Model:
    """Every example is twice in the batch axis: a dense layer sees 2·B rows."""
    inputs = keras.Input((LENGTH, WIDTH))
    twice = keras.ops.concatenate([inputs, 2 * inputs], axis=0)
    first, second = keras.ops.split(keras.layers.Dense(4)(twice), 2, axis=0)
    return keras.Model(inputs, pooled(first + second))


def batch_as_positions() -> keras.Model:
    """The batch is one example whose positions are its examples: records lead with 1."""
    inputs = keras.Input((LENGTH, WIDTH))
    whole = keras.ops.reshape(inputs, (1, -1, WIDTH))
    return keras.Model(inputs, pooled(keras.layers.Dense(4)(whole)))


def folds_inside() -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    return keras.Model(inputs, keras.layers.Dense(1)(pooled(FoldsInside()(inputs))))


def problem(model: Callable[[], keras.Model], data: Any = sequences) -> Problem:
    return Problem(model, data, removed=(0, EXAMPLES - 1))


ENTRIES = [
    Entry(f"positions folded: {name}", measured(problem(folded(make, inner))), MIXES, ways)
    for name, make, inner, ways in [
        ("Dense", lambda: keras.layers.Dense(4), (WIDTH,), EVERYWHERE),
        ("LayerNormalization", lambda: keras.layers.LayerNormalization(), (WIDTH,), FEW),
        ("EinsumDense", lambda: keras.layers.EinsumDense("bd,de->be", 4), (WIDTH,), FEW),
        ("a layer without a rule", Scale, (WIDTH,), FEW),
        ("PReLU", lambda: keras.layers.PReLU(alpha_initializer="ones"), (WIDTH,), FEW),
        ("GRU", lambda: keras.layers.GRU(4), (1, WIDTH), FEW),
        ("Conv1D", lambda: keras.layers.Conv1D(4, 1), (1, WIDTH), FEW),
    ]
] + [
    Entry(name, measured(of), expected, ways, apart=apart)
    for name, of, expected, ways, apart in [
        ("positions folded: Embedding", problem(embedded, texts), MIXES, EVERYWHERE, ()),
        (
            "positions folded: beside an honest lookup",
            problem(embedded_beside_a_lookup, texts),
            MIXES,
            FEW,
            (),
        ),
        ("positions folded: beside a head", problem(beside_a_head), MIXES, FEW, ()),
        ("positions lead", problem(positions_lead(LENGTH)), MIXES, FEW, ()),
        (
            "positions lead, as many as examples",
            problem(positions_lead(EXAMPLES), square_data),
            MIXES,
            ("graph", "xla"),
            (),
        ),
        ("each example twice", problem(each_twice), MIXES, FEW, ()),
        (
            "the batch as positions of one example",
            problem(batch_as_positions),
            MIXES,
            ("graph", "eager", "xla", "microbatches", "mirrored"),
            ONES,
        ),
        ("honest: a layer folds inside", problem(folds_inside), MEASURED, FEW, ()),
        ("honest: a frozen layer is folded", problem(frozen_and_folded), MEASURED, FEW, ()),
    ]
]
