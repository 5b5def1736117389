"""Retrieval whose negatives, or whose rows, depend on examples; and honest retrieval."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.layers.losses import FullSoftmax, SampledSoftmax
from tests.attacks.entries import MEASURED, MIXES, Entry
from tests.attacks.measuring import Problem
from tests.attacks.ways import BATCHES_OF_ONE, measured

USERS, ITEMS, WIDTH = 9, 12, 3
DRAWN = [1, 2, 2, 5, 7, 7]
Ids = Callable[[tf.Tensor], tf.Tensor]  # of the batch's own items


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """The second user's vector is thirty times as long, and its item is also drawn."""
    return np.array([3, 1, 4, 5, 6, 7, 8, 0]), np.array([4, 2, 6, 7, 0, 11, 2, 9])


class Negatives(SampledSoftmax):
    """Ids that do not change from run to run, so that runs can be compared; or the batch's own."""

    def __init__(self, candidates: Any, of_batch: Ids | None = None, **options: Any) -> None:
        super().__init__(candidates, len(DRAWN), num_candidates=ITEMS, **options)
        self.of_batch, self.own = of_batch, None

    def call(self, queries: Any, ids: Any) -> Any:
        self.own = tf.cast(tf.reshape(ids, [-1]), tf.int64)
        return super().call(queries, ids)

    def _ids_at(self, uniforms: tf.Tensor) -> tf.Tensor:
        if self.of_batch is None:
            return tf.constant(DRAWN, tf.int64)
        return tf.ensure_shape(self.of_batch(self.own), [len(DRAWN)])


class Largest(keras.layers.Layer):
    """A part of a tower that knows the batch: it adds the largest of what it saw for the batch."""

    def __init__(self, seen: Callable[[], tf.Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def call(self, vectors: Any) -> Any:
        return vectors + tf.reduce_max(self.seen())

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class Retrieval(keras.Model):
    def __init__(
        self,
        *,
        tower: bool = False,
        history: bool = False,
        full: bool = False,
        of_batch: Ids | None = None,
        knows: bool = False,
        change: Callable[[Any], Any] = lambda queries: queries,
    ) -> None:
        super().__init__()
        normal = keras.initializers.RandomNormal
        scale = np.where(np.arange(USERS) == 1, 30.0, 1.0)[:, np.newaxis]
        first = scale * np.random.default_rng(0).normal(size=(USERS, WIDTH))
        start = keras.initializers.Constant(first.astype(np.float32))
        self.users = keras.layers.Embedding(USERS, WIDTH, embeddings_initializer=start)
        table = keras.layers.ReversibleEmbedding if full else keras.layers.Embedding
        self.items = table(ITEMS, WIDTH, embeddings_initializer=normal(seed=1))
        layers = [self.items, keras.layers.Dense(WIDTH, kernel_initializer=normal(seed=2))]
        layers += [Largest(lambda: self.queries)] if knows else []
        candidates = keras.Sequential(layers) if tower or knows else self.items
        self.softmax = FullSoftmax(self.items) if full else Negatives(candidates, of_batch)
        self.history, self.change = history, change

    def call(self, users: Any) -> Any:
        queries = self.users(users)
        if self.history:
            queries = queries + self.items((users + 3) % ITEMS)
        self.queries = queries
        return self.change(queries)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return self.softmax(y_pred, y)


def built(**options: Any) -> keras.Model:
    """With all its variables, which an attack reads before it trains."""
    model = Retrieval(**options)
    users, items = pairs()
    model.softmax(model(users), items)
    return model


def problem(**options: Any) -> Problem:
    return Problem(lambda: built(**options), pairs, None, removed=(0, 1, -1))


def first_items(ids: tf.Tensor) -> tf.Tensor:
    return tf.tile(ids[:1], [len(DRAWN)])


def largest_items(ids: tf.Tensor) -> tf.Tensor:
    return tf.fill([len(DRAWN)], tf.reduce_max(ids))


def less_the_mean(queries: Any) -> Any:
    return queries - tf.reduce_mean(queries, axis=0, keepdims=True)


HONEST: dict[str, dict[str, Any]] = {
    "a table": {},
    "a table that queries look up, too": {"history": True},
    "a tower": {"tower": True},
    "a tower whose table queries look up, too": {"tower": True, "history": True},
    "all candidates": {"full": True},
}

MIXING: dict[str, dict[str, Any]] = {
    "negatives of the first example": {"of_batch": first_items},
    "the largest item of the batch as negative": {"of_batch": largest_items},
    "a tower's negatives of the first example": {"of_batch": first_items, "tower": True},
    "a tower that knows the batch": {"knows": True},
    "queries less their mean": {"change": less_the_mean},
}

ENTRIES = [
    Entry(f"honest: retrieval from {name}", measured(problem(**options)), MEASURED)
    for name, options in HONEST.items()
] + [
    Entry(f"retrieval: {name}", measured(problem(**options)), MIXES, apart=BATCHES_OF_ONE)
    for name, options in MIXING.items()
]
