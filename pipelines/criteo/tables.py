"""The click model with its tables in an embedding layer, on a Cloud TPU or without one."""

import contextlib
from typing import Any

import keras
import ml_collections
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import dp_sparse
from models.pctr import embedding_width, pctr_over_rows
from pipelines.criteo.methods import private_optimizer, table_names
from pipelines.criteo.records import PreparedData
from pipelines.criteo.sources import Training

_E = tf.tpu.experimental.embedding


def tpu_strategy(name: str) -> tf.distribute.TPUStrategy:
    """Connects to a Cloud TPU and starts it.

    Raises:
        ValueError: There is no such TPU.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, ImportError, tf.errors.OpError) as error:
        raise ValueError(
            f"Expected the name of a TPU, or local on its own machine, got tpu={name!r}: {error}"
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def engine_of(
    strategy: tf.distribute.TPUStrategy, tables: dp_sparse.distribution.PrivateTables
) -> Any:
    """The embedding layer for the kind of TPU.

    Raises:
        ValueError: The TPU has no support for embeddings.
    """
    kinds = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
    hardware, config = strategy.extended.tpu_hardware_feature, tables.feature_config
    if hardware.embedding_feature == kinds.V1:
        return _E.TPUEmbedding(config, None)
    if hardware.embedding_feature != kinds.V2:
        raise ValueError("Expected a TPU with support for embeddings, got one without.")
    capacities = tables.sparse_core_config
    return _E.TPUEmbeddingV2(config, None, sparse_core_embedding_config=capacities)


class LayerJob:
    """What is trained: the model over looked-up rows, the tables, and the layer that holds them.

    Args:
        config: The config of the run, with method `dp_adafest` and model `pctr`.
        data: The prepared records.
        training: The records to train on.
        steps: Steps of the whole run.
        strategy: The strategy of a TPU, or None.

    Raises:
        ValueError: The config has another method or model.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        data: PreparedData,
        training: Training,
        steps: int,
        strategy: tf.distribute.TPUStrategy | None,
    ) -> None:
        if (config.method, config.model) != ("dp_adafest", "pctr"):
            raise ValueError(
                "Expected method=dp_adafest and model=pctr with an embedding layer, got "
                f"method={config.method!r} and model={config.model!r}."
            )
        sizes = dict(zip(table_names(len(data.vocabularies)), data.vocabularies, strict=True))
        self._strategy = strategy
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            self.optimizer = private_optimizer(config, data, training, steps)
            self.tables = dp_sparse.distribution.PrivateTables(
                {name: _feature(name, size) for name, size in sizes.items()},
                self.optimizer,
                strategy=strategy,
            )
            self.layer = self._made_layer()
            widths = {name: embedding_width(size) for name, size in sizes.items()}
            self.model: keras.Model = pctr_over_rows(widths)

    def scores(self, x: Any) -> np.ndarray:
        """Logits of inputs, float32 `[examples]`, with the tables as they are now."""
        layer = dp_sparse.distribution.serving_layer(self.tables, self.layer)
        inputs = dp_sparse.distribution.model_inputs(self.tables, layer, x)
        return self.model.predict(inputs, batch_size=8192, verbose=0)[:, 0]

    def _made_layer(self) -> Any:
        config = self.tables.feature_config
        if self._strategy is None:
            return _E.TPUEmbeddingForServing(config, None)
        return engine_of(self._strategy, self.tables)


def examples_by_feature(
    records: npt.NDArray[np.void],
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As `schema.examples_from_records`, but each category under the name of its table."""
    ids = records["categories"]
    named = {name: ids[:, i].copy() for i, name in enumerate(table_names(ids.shape[1]))}
    return {"integers": records["integers"].copy(), **named}, records["label"].copy()


def _feature(name: str, size: int) -> Any:
    table = _E.TableConfig(
        size,
        embedding_width(size),
        initializer=tf.random_uniform_initializer(-0.05, 0.05),
        combiner="sum",
        name=name,
    )
    return _E.FeatureConfig(table, name=name)
