"""Copies of a TPU's tables on the host, to evaluate, predict and serve with."""

import tempfile
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import translated
from dp_sparse.distribution.embedding_layers.host_step import HostStep, other_inputs
from dp_sparse.distribution.embedding_layers.layer_adapters import layer_of
from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables

_E = tf.tpu.experimental.embedding


def serving_layer(tables: PrivateTables, layer: Any) -> Any:
    """A layer on the host with the tables that a TPU's layer has now; off TPU, the layer itself.

    Args:
        tables: What the layer was made with.
        layer: The embedding layer; for one of keras-rs on a TPU use its `get_embedding_tables`.

    Returns:
        A `TPUEmbeddingForServing`, for `model_inputs`; later training does not change it.

    Raises:
        ValueError: A layer of another kind.
        PrivacyError: A layer of another configuration.

    It writes a temporary file as large as the tables and their slots. Call it outside of
    `strategy.scope()`.

    Examples:
        >>> import dp_sparse, tensorflow as tf
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0)
        >>> E = tf.tpu.experimental.embedding
        >>> user = E.FeatureConfig(E.TableConfig(10, 2, name="users"), name="user")
        >>> tables = dp_sparse.distribution.PrivateTables({"user": user}, optimizer)
        >>> layer = E.TPUEmbeddingForServing(tables.feature_config, None)  # off TPU
        >>> dp_sparse.distribution.serving_layer(tables, layer) is layer  # on a TPU, a copy
        True
    """
    layer_of(layer, tables)
    if not tables.on_tpu:
        return layer
    engine = getattr(layer, "_tpu_embedding", layer)  # TensorFlow Recommenders' has it inside
    if not isinstance(engine, _E.TPUEmbedding | _E.TPUEmbeddingV2):
        raise ValueError(
            "Expected a TPUEmbedding or TPUEmbeddingV2 of tf.tpu.experimental.embedding or of "
            f"tensorflow_recommenders, got {type(layer).__name__}: read its tables by its "
            "own library."
        )
    return copied(engine, tables)


def copied(embedding: Any, tables: PrivateTables) -> Any:
    """A `TPUEmbeddingForServing` with the tables of another layer, copied by a checkpoint.

    Raises:
        ValueError: The checkpoint lacks a table.
    """
    config = tables.serving_config
    for feature in config.values():
        feature.table.initializer = _unread
    copy = _E.TPUEmbeddingForServing(config, None)
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(embedding=embedding).save(f"{folder}/tables")
        restored = tf.train.Checkpoint(embedding=copy).restore(saved)
        copy.build()  # reads now: the layout of SparseCores is needed before there are variables
        restored.expect_partial()  # tables in the layout of SparseCores count as not matched
    for table, values in copy.embedding_tables.items():
        if tf.reduce_all(tf.math.is_nan(values)):
            raise ValueError(
                f"Expected the table {table.name!r} in a checkpoint of {type(embedding).__name__}, "
                "got none: was the layer built?"
            )
    return copy


def _unread(shape: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
    return tf.fill(shape, tf.constant(float("nan"), dtype))


def model_inputs(tables: PrivateTables, layer: Any, x: dict[str, Any]) -> dict[str, np.ndarray]:
    """Inputs of the model, to evaluate or predict with, from those of a data source; off TPU.

    Args:
        tables: What the layer was made with.
        layer: The embedding layer; for tables on a TPU, the result of `serving_layer`.
        x: Ids of each feature, and all other inputs, arrays `[examples, ...]`.

    Returns:
        Float32 `[examples, width]` for each feature, and the rest of `x`.

    Raises:
        ValueError: Inputs that do not fit the features, or a layer of another kind.
        PrivacyError: A layer of another configuration.
        BadExampleError: An id or a weight out of its range.

    Examples:
        >>> import dp_sparse, numpy as np, tensorflow as tf
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0)
        >>> E = tf.tpu.experimental.embedding
        >>> user = E.FeatureConfig(E.TableConfig(10, 2, name="users"), name="user")
        >>> tables = dp_sparse.distribution.PrivateTables({"user": user}, optimizer)
        >>> layer = E.TPUEmbeddingForServing(tables.feature_config, None)  # off TPU
        >>> ids = {"user": np.arange(3)}
        >>> x = dp_sparse.distribution.model_inputs(tables, layer, ids)
        >>> x["user"].shape  # activations, for `model.predict(x)`
        (3, 2)
    """
    if tables.on_tpu and not isinstance(layer, _E.TPUEmbeddingForServing):
        raise ValueError(
            f"Expected the result of serving_layer, got {type(layer).__name__}: a TPU looks rows "
            "up in training alone."
        )
    own, host, most = layer_of(layer, tables), HostStep(tables), tables.examples
    size = _common_length(x)
    parts = []
    for begin in range(0, size, most):
        part = {
            name: _filled(np.asarray(value)[begin : begin + most], most)
            for name, value in x.items()
        }
        with translated():
            features, weights = host.to_look_up(part)
        activations = own.look_up(features, weights).activations
        parts.append({f.name: activations[f.name].numpy() for f in tables.features})
    joined = {name: np.concatenate([part[name] for part in parts])[:size] for name in parts[0]}
    return {**{name: np.asarray(v) for name, v in other_inputs(x, tables).items()}, **joined}


def _common_length(x: dict[str, Any]) -> int:
    if not isinstance(x, dict):
        raise ValueError(
            f"Expected inputs in a dictionary, the ids of each feature, got {type(x).__name__}."
        )
    lengths = {name: len(value) for name, value in x.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"Expected inputs of one length, 1 or more, got {lengths}.")
    return next(iter(lengths.values()))


def _filled(values: np.ndarray, examples: int) -> tf.Tensor:
    missing = [(0, examples - len(values))] + [(0, 0)] * (values.ndim - 1)
    return tf.constant(np.pad(values, missing))
