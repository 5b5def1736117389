"""What a private step does to the tables of every kind of layer: the update, and nothing else."""

from collections.abc import Callable
from typing import Any

import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf
from keras_rs.src.layers.embedding.tensorflow import distributed_embedding

from dp_sparse import distribution
from dp_sparse.core.errors import PrivacyError
from dp_sparse.distribution.embedding_layers import layer_adapters
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import SparseCore, TensorCore, read


def serving(tables: distribution.PrivateTables) -> two_tables.Made:
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    return layer, lambda: {t.name: v.numpy() for t, v in layer.embedding_tables.items()}


def sparse_core(tables: distribution.PrivateTables) -> two_tables.Made:
    engine = SparseCore(tables.feature_config, two_tables.INITIAL)
    return layer_adapters.SparseCoreLayer(engine), lambda: read(engine)


def tensor_core(tables: distribution.PrivateTables) -> two_tables.Made:
    engine = TensorCore(tables.feature_config, two_tables.INITIAL)
    return layer_adapters.TensorCoreLayer(engine), lambda: read(engine)


def distributed(tables: distribution.PrivateTables) -> two_tables.Made:
    layer = keras_rs.layers.DistributedEmbedding(tables.feature_config)

    def values() -> two_tables.Values:
        return {v.path.split("/")[-2]: v.numpy() for v in layer.trainable_variables}

    layer(tables_zero_features(tables))
    return layer, values


def tables_zero_features(tables: distribution.PrivateTables) -> Any:
    x = {name: tf.constant(v) for name, v in two_tables.data()[0].items()}
    rows = tables.examples - two_tables.SIZE
    x = {k: tf.pad(v, [[0, rows]] + [[0, 0]] * (v.shape.rank - 1)) for k, v in x.items()}
    return lookups_of(tables, x)


def lookups_of(tables: distribution.PrivateTables, x: Any) -> Any:
    from dp_sparse.distribution.embedding_layers.host_step import HostStep

    return HostStep(tables).to_look_up(x)[0]


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "float64"])
def test_other_policies_of_keras_are_refused(policy: str) -> None:
    """Off float32 a sum of gradient and noise would tell what it was made of."""
    tables = two_tables.private_tables(
        two_tables.private_optimizer(), two_tables.keras_rs_features()
    )
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        layer = keras_rs.layers.DistributedEmbedding(tables.feature_config)
        with pytest.raises(PrivacyError, match="layer in float32, got b?float"):
            distribution.model_inputs(tables, layer, two_tables.data()[0])
    finally:
        keras.config.set_dtype_policy(before)


def distributed_on_sparse_cores(tables: distribution.PrivateTables) -> two_tables.Made:
    """keras-rs' own code for TPUs, its gradient trap included, over the stand-in."""
    layer = keras_rs.layers.DistributedEmbedding(tables.feature_config)
    places = layer._placement_to_path_to_feature_config
    places["sparsecore"] = places.pop("default_device")
    layer._gradient_trap_dummy = keras.Variable(np.zeros((1,), "float32"), name="dummy")
    engine = SparseCore(tables.feature_config, two_tables.INITIAL)

    def call(features: Any, weights: Any) -> Any:
        return distributed_embedding.DistributedEmbedding._tpu_embedding_lookup_v2(
            layer, engine, features, weights
        )

    sources = lambda: [layer._gradient_trap_dummy.value]  # noqa: E731
    return layer_adapters.RecordedLayer(call, sources, None), lambda: read(engine)


KINDS: dict[str, tuple[Callable[..., two_tables.Made], Callable[[str], Any]]] = {
    "serving": (serving, two_tables.tf_features),
    "sparse core": (sparse_core, two_tables.tf_features),
    "tensor core": (tensor_core, two_tables.tf_features),
    "keras_rs": (distributed, two_tables.keras_rs_features),
    "keras_rs on sparse cores": (distributed_on_sparse_cores, two_tables.keras_rs_features),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["sgd", "adagrad"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_a_direct_scatter(kind: str, wrapped: str) -> None:
    make, features = KINDS[kind]
    two_tables.assert_update(make, features("sum"), wrapped, "sum", weighted=True)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["serving", "sparse core"])
def test_bags_of_other_combiners(kind: str, combiner: str, weighted: bool) -> None:
    make, features = KINDS[kind]
    two_tables.assert_update(make, features(combiner), "sgd", combiner, weighted=weighted)
