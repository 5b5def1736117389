"""Three kinds of embedding layers, each as a lookup whose gradients are handed over once.

On a TPU the layers of TensorFlow Recommenders and keras-rs update their tables whenever a backward
pass reaches the lookup, with whatever gradient arrives. So a model sees only activations that no
tape leads back from, and one gradient, the private one, goes through the tape of the lookup.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dp_sparse.rows import adagrad_rows, sgd_rows

_E = tf.tpu.experimental.embedding

Tensors = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One lookup of all features of a layer.

    Attributes:
        activations: `[rows, width]` of each feature, detached from every tape.
        push: Takes the gradient of each activation, and updates the tables; to be called once.
    """

    activations: Tensors
    push: Callable[[Tensors], None]


class TableLayer(abc.ABC):
    """An embedding layer, of whatever kind."""

    @abc.abstractmethod
    def look_up(self, features: Tensors, weights: Tensors) -> Lookup:
        """Looks ids up, to be updated by one push; `weights` are those of some features."""

    def activations(self, features: Tensors, weights: Tensors) -> Tensors:
        """The activations alone, off TPU; no update follows."""
        return self.look_up(features, weights).activations


class RecordedLayer(TableLayer):
    """A layer that a tape leads through, to its tables, or to what stands for them on a TPU.

    Args:
        call: Looks features up, given them and their weights, or None.
        sources: The variables that the tape leads to.
        updates: Off TPU, where the variables are the tables, what updates them.
    """

    def __init__(
        self,
        call: Callable[[Tensors, Tensors | None], Tensors],
        sources: Callable[[], Sequence[tf.Variable]],
        updates: "RowUpdates | None",
    ) -> None:
        self._call, self._sources, self._updates = call, sources, updates

    def look_up(self, features: Tensors, weights: Tensors) -> Lookup:
        """Under a tape of its own."""
        with tf.GradientTape() as tape:
            live = self._call(features, _of_all(features, weights))

        def push(gradients: Tensors) -> None:
            tf.nest.assert_same_structure(live, gradients)
            sources = list(self._sources())
            found = tape.gradient(live, sources, output_gradients=gradients)
            if self._updates is not None:
                self._updates.apply(sources, found)

        return Lookup({name: tf.stop_gradient(value) for name, value in live.items()}, push)


class SparseCoreLayer(TableLayer):
    """`TPUEmbeddingV2`, whose tables are in SparseCores."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    def look_up(self, features: Tensors, weights: Tensors) -> Lookup:
        """By its call, which keeps what `apply_gradients` needs."""
        live, kept = self._embedding(features, _of_all(features, weights))

        def push(gradients: Tensors) -> None:
            self._embedding.apply_gradients(gradients, preserved_outputs=kept)

        return Lookup({name: tf.stop_gradient(value) for name, value in live.items()}, push)


class TensorCoreLayer(TableLayer):
    """`TPUEmbedding`, of TPUs without SparseCores: one enqueue and one dequeue a step."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    def look_up(self, features: Tensors, weights: Tensors) -> Lookup:
        """Through the queue of the engine."""
        self._embedding.enqueue(features, _of_all(features, weights), training=True)
        live = self._embedding.dequeue()
        detached = {name: tf.stop_gradient(value) for name, value in live.items()}
        return Lookup(detached, self._embedding.apply_gradients)


class RowUpdates(tf.Module):
    """Off TPU, the update that a TPU makes: once for each row, of the sum of its gradients.

    Args:
        optimizer: Of the tables, `tf.tpu.experimental.embedding.SGD` or `Adagrad`.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._slots: list[tf.Variable] = []  # of Adagrad, one for each table

    def apply(self, tables: Sequence[tf.Variable], gradients: Sequence[tf.IndexedSlices]) -> None:
        """Updates tables by their gradients, whose rows may repeat. O(rows · width)."""
        if isinstance(self._optimizer, _E.Adagrad) and not self._slots:
            with tf.init_scope():
                start = self._optimizer.initial_accumulator_value
                made = [tf.Variable(tf.fill(t.shape, start), trainable=False) for t in tables]
            self._slots.extend(made)
        rate = tf.cast(self._optimizer.learning_rate(), tf.float32)
        for index, (table, gradient) in enumerate(zip(tables, gradients, strict=True)):
            rows = summed_rows(gradient)
            if isinstance(self._optimizer, _E.SGD):
                sgd_rows(table, rows, rate)
            else:
                adagrad_rows(table, self._slots[index], rows, rate, epsilon=0.0)


def summed_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once, summed in float64."""
    rows, places = tf.unique(tf.reshape(tf.cast(gradient.indices, tf.int64), [-1]))
    values = tf.reshape(gradient.values, [-1, tf.shape(gradient.values)[-1]])
    sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.float64), places, tf.size(rows))
    return tf.IndexedSlices(tf.cast(sums, tf.float32), rows, gradient.dense_shape)


def layer_of(layer: Any, updates: RowUpdates) -> TableLayer:
    """The layer as a `TableLayer`, by its class.

    Raises:
        ValueError: Any other kind of layer, or one on a TPU that trains its tables by itself.
    """
    if isinstance(layer, TableLayer):
        return layer
    if isinstance(layer, _E.TPUEmbeddingForServing):
        tables = lambda: list(layer.embedding_tables.values())  # noqa: E731
        return RecordedLayer(layer, tables, updates)
    if isinstance(layer, _E.TPUEmbeddingV2):
        return SparseCoreLayer(layer)
    if isinstance(layer, _E.TPUEmbedding):
        return TensorCoreLayer(layer)
    module = type(layer).__module__
    if module.startswith("tensorflow_recommenders.") and hasattr(layer, "_tpu_embedding"):
        return _of_recommenders(layer, updates)
    if module.startswith("keras_rs.") and hasattr(layer, "_placement_to_path_to_feature_config"):
        return _of_keras_rs(layer, updates)
    raise ValueError(
        "Expected a TPUEmbeddingForServing, TPUEmbedding or TPUEmbeddingV2, tensorflow_recommenders"
        f"' TPUEmbedding or keras_rs' DistributedEmbedding, got {type(layer).__name__}."
    )


def _of_recommenders(layer: Any, updates: RowUpdates) -> TableLayer:
    if isinstance(layer._tpu_embedding, _E.TPUEmbeddingV0):
        raise ValueError("Expected a TPU with support for embeddings, got one without.")
    off_tpu = isinstance(layer._tpu_embedding, _E.TPUEmbeddingForServing)
    return RecordedLayer(layer, lambda: layer.trainable_variables, updates if off_tpu else None)


def _of_keras_rs(layer: Any, updates: RowUpdates) -> TableLayer:
    placements = set(layer._placement_to_path_to_feature_config)
    if len(placements) != 1:
        raise ValueError(
            f"Expected all tables of {layer.name} in one place, got {sorted(placements)}: give "
            "those on other devices to the model as keras.layers.Embedding."
        )
    variables = lambda: [variable.value for variable in layer.trainable_variables]  # noqa: E731
    return RecordedLayer(layer, variables, updates if placements == {"default_device"} else None)


def _of_all(features: Tensors, weights: Tensors) -> Tensors | None:
    return {name: weights.get(name) for name in features} if weights else None
