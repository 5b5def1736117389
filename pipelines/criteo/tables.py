"""Click models with their tables in an embedding layer, on a Cloud TPU or without one.

`pctr` looks them up in TensorFlow's layers, and `ranking` is TensorFlow Recommenders' Ranking with
its own.
"""

import contextlib
import functools
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
from pipelines.criteo.schema import NUM_INTEGERS
from pipelines.criteo.sources import Training, Unpack

_E = tf.tpu.experimental.embedding
_INTEGERS = {"pctr": "integers", "ranking": "dense_features"}  # as each model names them


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
        config: The config of the run, with method `dp_adafest` and model `pctr` or `ranking`.
        data: The prepared records.
        training: The records to train on, read by `reader_of` the model.
        steps: Steps of the whole run.
        strategy: The strategy of a TPU, or None.

    Raises:
        ValueError: The config has another method or model, or `ranking` cannot run in this process.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        data: PreparedData,
        training: Training,
        steps: int,
        strategy: tf.distribute.TPUStrategy | None,
    ) -> None:
        if config.method != "dp_adafest":
            raise ValueError(
                f"Expected method=dp_adafest with an embedding layer, got method={config.method!r}."
            )
        make = self._ranking if config.model == "ranking" else self._pctr
        self._strategy = strategy
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            self.optimizer = private_optimizer(config, data, training, steps)
            make(dict(zip(table_names(len(data.vocabularies)), data.vocabularies, strict=True)))

    def scores(self, x: Any) -> np.ndarray:
        """Logits of inputs, float32 `[examples]`, with the tables as they are now."""
        layer = self.layer
        if self._strategy is not None:
            layer = dp_sparse.distribution.serving_layer(self.tables, layer)
        inputs = dp_sparse.distribution.model_inputs(self.tables, layer, x)
        return self.model.predict(inputs, batch_size=8192, verbose=0)[:, 0]

    def _pctr(self, sizes: dict[str, int]) -> None:
        widths = {name: embedding_width(size) for name, size in sizes.items()}
        self.tables = self._private_tables(sizes, widths)
        config = self.tables.feature_config
        if self._strategy is None:
            self.layer: Any = _E.TPUEmbeddingForServing(config, None)
        else:
            self.layer = engine_of(self._strategy, self.tables)
        self.model: keras.Model = pctr_over_rows(widths)

    def _ranking(self, sizes: dict[str, int]) -> None:
        if self._strategy is not None:
            raise ValueError(
                "Expected model=pctr on a TPU, got model='ranking': its tables cannot be read "
                "back from one. Without a TPU, it trains the same way."
            )
        from models.tfrs_ranking import WIDTH, over_tables

        self.tables = self._private_tables(sizes, dict.fromkeys(sizes, WIDTH))
        ranking = over_tables(self.tables.feature_config)
        self.layer = ranking._embedding_layer
        self.model = dp_sparse.distribution.RankingModel(ranking, self.tables, NUM_INTEGERS)

    def _private_tables(
        self, sizes: dict[str, int], widths: dict[str, int]
    ) -> dp_sparse.distribution.PrivateTables:
        features = {name: _feature(name, size, widths[name]) for name, size in sizes.items()}
        return dp_sparse.distribution.PrivateTables(
            features, self.optimizer, strategy=self._strategy
        )


def reader_of(model: str) -> Unpack:
    """What makes examples of records, with the names that the inputs of this model have.

    Raises:
        ValueError: There is no such model with an embedding layer.
    """
    if model not in _INTEGERS:
        raise ValueError(
            f"Expected model=pctr or ranking with an embedding layer, got model={model!r}."
        )
    return functools.partial(_examples_by_feature, integers=_INTEGERS[model])


def _examples_by_feature(
    records: npt.NDArray[np.void], integers: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As `schema.examples_from_records`, but each category under the name of its table."""
    ids = records["categories"]
    named = {name: ids[:, i].copy() for i, name in enumerate(table_names(ids.shape[1]))}
    return {integers: records["integers"].copy(), **named}, records["label"].copy()


def _feature(name: str, size: int, width: int) -> Any:
    table = _E.TableConfig(
        size,
        width,
        initializer=tf.random_uniform_initializer(-0.05, 0.05),
        combiner="sum",
        name=name,
    )
    return _E.FeatureConfig(table, name=name)
