"""Adapters for three kinds of embedding layers: each makes a lookup and pushes one gradient.

On a TPU the layers of TensorFlow Recommenders and keras-rs update their tables whenever a backward
pass reaches the lookup, by any gradient that arrives. So the model gets activations that are
detached from every tape, and only the private gradient passes through the tape of the lookup.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError
from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables
from dp_sparse.distribution.embedding_layers.rounding_grid import RowUpdates

PIPELINING = ("_pipeline_execution_with_tensor_core", "_pipelining")  # V1 and keras-rs; V2
_E = tf.tpu.experimental.embedding

Tensors = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LookedUp:
    """What a layer looked up for all of its features.

    Attributes:
        activations: `[rows, width]` of each feature, detached from every tape.
        push: Updates the tables by the gradient of each activation; call it once.
    """

    activations: Tensors
    push: Callable[[Tensors], None]


class TableLayer(abc.ABC):
    """An embedding layer of any kind."""

    @abc.abstractmethod
    def look_up(self, features: Tensors, weights: Tensors) -> LookedUp:
        """Looks ids up, for one push; `weights` are those of the features that have weights."""

    @abc.abstractmethod
    def build(self, features: Tensors, weights: Tensors) -> None:
        """Creates the layer's variables from features to look up, before anything is traced."""


class RecordedLayer(TableLayer):
    """A layer whose gradients a tape computes, for its tables or their stand-ins on a TPU.

    Args:
        call: Looks up features, given them and their weights, or None.
        variables: Gives the variables for which the tape computes gradients.
        updates: Off TPU, where the variables are the tables, what updates them; else None.
    """

    def __init__(
        self,
        call: Callable[[Tensors, Tensors | None], Tensors],
        variables: Callable[[], Sequence[tf.Variable]],
        updates: RowUpdates | None,
    ) -> None:
        self._call, self._variables, self._updates = call, variables, updates

    def build(self, features: Tensors, weights: Tensors) -> None:
        """Off TPU, by a lookup; on a TPU the library builds it."""
        if self._updates is not None:
            self.look_up(features, weights)

    def look_up(self, features: Tensors, weights: Tensors) -> LookedUp:
        """Under a tape of its own."""
        with tf.GradientTape() as tape:
            live = self._call(features, _of_all(features, weights))

        def push(gradients: Tensors) -> None:
            tf.nest.assert_same_structure(live, gradients)
            variables = list(self._variables())
            found = tape.gradient(live, variables, output_gradients=gradients)
            if self._updates is not None:
                self._updates.apply(variables, found)

        _refuse_other_dtypes([*live.values(), *self._variables()])
        return LookedUp(_detached(live), push)


class _Engine(TableLayer):
    """What the TPU classes of `tf.tpu.experimental.embedding` have in common."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    def build(self, features: Tensors, weights: Tensors) -> None:
        """By its configuration, which has all shapes."""
        self._embedding.build()


class SparseCoreLayer(_Engine):
    """`TPUEmbeddingV2`, whose tables are in SparseCores."""

    def look_up(self, features: Tensors, weights: Tensors) -> LookedUp:
        """By its call, which keeps what `apply_gradients` needs."""
        live, kept = self._embedding(features, _of_all(features, weights))

        def push(gradients: Tensors) -> None:
            self._embedding.apply_gradients(gradients, preserved_outputs=kept)

        return LookedUp(_detached(live), push)


class TensorCoreLayer(_Engine):
    """`TPUEmbedding`, of TPUs without SparseCores: one enqueue and one dequeue a step."""

    def look_up(self, features: Tensors, weights: Tensors) -> LookedUp:
        """Through the queue of the engine."""
        self._embedding.enqueue(features, _of_all(features, weights), training=True)
        return LookedUp(_detached(self._embedding.dequeue()), self._embedding.apply_gradients)


def layer_of(layer: Any, tables: PrivateTables) -> TableLayer:
    """The layer as a `TableLayer`, by its class.

    Raises:
        ValueError: Any other kind of layer.
        PrivacyError: The layer was not made with `tables.feature_config`, or has options with which
            a step is not one update of the selected rows.
    """
    made = _made(layer, tables.updates)
    for part in (layer, getattr(layer, "_tpu_embedding", None)):
        _refuse_options(part)
    configs = getattr(layer, "_feature_configs", None) or layer._feature_config
    names = set(configs) if isinstance(configs, dict) else set()
    others = [
        c for c in tf.nest.flatten(configs) if c.table.optimizer is not tables.layer_optimizer
    ]
    if others or names != set(tables.feature_config):
        raise PrivacyError(
            f"Expected a {type(layer).__name__} made with tables.feature_config, got another "
            "configuration: without these features there is no noise, and other optimizers change "
            "all rows that were looked up."
        )
    return made


def _made(layer: Any, updates: RowUpdates) -> TableLayer:
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


def _refuse_options(part: Any) -> None:
    if any(getattr(part, name, False) for name in PIPELINING):
        raise PrivacyError(
            "Expected pipeline_execution_with_tensor_core=False, got True: leave it out."
        )
    if getattr(getattr(part, "_sparse_core_embedding_config", None), "allow_id_dropping", False):
        raise PrivacyError(
            "Expected allow_id_dropping=False, got True: dropped ids may be those of noise. Use "
            "tables.sparse_core_config."
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
            f"Expected all tables of {layer.name} on one kind of device, got "
            f"{sorted(placements)}: use keras.layers.Embedding in the model for the others."
        )
    variables = lambda: [variable.value for variable in layer.trainable_variables]  # noqa: E731
    return RecordedLayer(layer, variables, updates if placements == {"default_device"} else None)


def _detached(live: Tensors) -> Tensors:
    return {name: tf.stop_gradient(value) for name, value in live.items()}


def _refuse_other_dtypes(values: Sequence[Any]) -> None:
    others = {tf.as_dtype(value.dtype).name for value in values} - {"float32"}
    if others:
        raise PrivacyError(
            f"Expected an embedding layer in float32, got {sorted(others)[0]}, in which gradients "
            "and their noise are not added exactly: make the layer under "
            'keras.config.set_dtype_policy("float32").'
        )


def _of_all(features: Tensors, weights: Tensors) -> Tensors | None:
    return {name: weights.get(name) for name in features} if weights else None
