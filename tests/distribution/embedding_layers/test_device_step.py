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
from tests.distribution.embedding_layers import cases
from tests.distribution.embedding_layers.emulator import SparseCore, TensorCore

Values = dict[str, np.ndarray]
Made = tuple[Any, Callable[[], Values]]  # a layer, and how to read its tables

INITIAL = {
    name: np.random.default_rng(5).normal(size=(rows, cases.WIDTH)).astype("float32")
    for name, rows in cases.ROWS.items()
}


def serving(tables: distribution.PrivateTables) -> Made:
    layer = cases.E.TPUEmbeddingForServing(tables.feature_config, None)
    return layer, lambda: {t.name: v.numpy() for t, v in layer.embedding_tables.items()}


def sparse_core(tables: distribution.PrivateTables) -> Made:
    engine = SparseCore(tables.feature_config, INITIAL)
    return layer_adapters.SparseCoreLayer(engine), lambda: read(engine)


def tensor_core(tables: distribution.PrivateTables) -> Made:
    engine = TensorCore(tables.feature_config, INITIAL)
    return layer_adapters.TensorCoreLayer(engine), lambda: read(engine)


def read(engine: SparseCore) -> Values:
    assert int(engine.updates) <= 1
    return {name: table.numpy() for name, table in engine.tables.items()}


def keras_rs_features(combiner: str = "sum") -> dict[str, Any]:
    tables = {
        name: keras_rs.layers.TableConfig(name, rows, cases.WIDTH, combiner=combiner)
        for name, rows in cases.ROWS.items()
    }
    shapes = {name: (cases.SIZE,) for name in cases.FEATURES}
    return {
        name: keras_rs.layers.FeatureConfig(
            name, tables[table], shapes[name], (cases.SIZE, cases.WIDTH)
        )
        for name, table in cases.FEATURES.items()
    }


def distributed(tables: distribution.PrivateTables) -> Made:
    layer = keras_rs.layers.DistributedEmbedding(tables.feature_config)

    def values() -> Values:
        return {v.path.split("/")[-2]: v.numpy() for v in layer.trainable_variables}

    layer(tables_zero_features(tables))
    return layer, values


def tables_zero_features(tables: distribution.PrivateTables) -> Any:
    x = {name: tf.constant(v) for name, v in cases.data()[0].items()}
    rows = tables.rows - cases.SIZE
    x = {k: tf.pad(v, [[0, rows]] + [[0, 0]] * (v.shape.rank - 1)) for k, v in x.items()}
    return lookups_of(tables, x)


def lookups_of(tables: distribution.PrivateTables, x: Any) -> Any:
    from dp_sparse.distribution.embedding_layers.host_step import HostStep

    return HostStep(tables).to_look_up(x)[0]


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "float64"])
def test_other_policies_of_keras_are_refused(policy: str) -> None:
    """Off float32 a sum of gradient and noise would tell what it was made of."""
    tables = cases.private_tables(cases.private_optimizer(), keras_rs_features())
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        layer = keras_rs.layers.DistributedEmbedding(tables.feature_config)
        with pytest.raises(PrivacyError, match="layer in float32, got b?float"):
            distribution.model_inputs(tables, layer, cases.data()[0])
    finally:
        keras.config.set_dtype_policy(before)


def distributed_on_sparse_cores(tables: distribution.PrivateTables) -> Made:
    """keras-rs' own code for TPUs, its gradient trap included, over the stand-in."""
    layer = keras_rs.layers.DistributedEmbedding(tables.feature_config)
    places = layer._placement_to_path_to_feature_config
    places["sparsecore"] = places.pop("default_device")
    layer._gradient_trap_dummy = keras.Variable(np.zeros((1,), "float32"), name="dummy")
    engine = SparseCore(tables.feature_config, INITIAL)

    def call(features: Any, weights: Any) -> Any:
        return distributed_embedding.DistributedEmbedding._tpu_embedding_lookup_v2(
            layer, engine, features, weights
        )

    sources = lambda: [layer._gradient_trap_dummy.value]  # noqa: E731
    return layer_adapters.RecordedLayer(call, sources, None), lambda: read(engine)


KINDS: dict[str, tuple[Callable[..., Made], Callable[[str], Any]]] = {
    "serving": (serving, cases.tf_features),
    "sparse core": (sparse_core, cases.tf_features),
    "tensor core": (tensor_core, cases.tf_features),
    "keras_rs": (distributed, keras_rs_features),
    "keras_rs on sparse cores": (distributed_on_sparse_cores, keras_rs_features),
}


@pytest.mark.parametrize("wrapped", ["sgd", "adagrad"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_a_direct_scatter(kind: str, wrapped: str) -> None:
    make, features = KINDS[kind]
    assert_update(make, features("sum"), wrapped, "sum", weighted=True)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["serving", "sparse core"])
def test_bags_of_other_combiners(kind: str, combiner: str, weighted: bool) -> None:
    make, features = KINDS[kind]
    assert_update(make, features(combiner), "sgd", combiner, weighted=weighted)


def assert_update(
    make: Callable[..., Made], features: Any, wrapped: str, combiner: str, weighted: bool
) -> None:
    """To 1e-6, and on exactly the rows that were chosen: some looked up, some by noise alone."""
    optimizer, source = cases.private_optimizer(wrapped), cases.data()
    tables = cases.private_tables(optimizer, features, weighted=weighted)
    layer, values = make(tables)
    model = cases.compiled_model(optimizer, weighted=weighted)
    batch = cases.prepared(tables, source)
    before = {name: table.copy() for name, table in values().items()}
    expected = cases.expected_update(
        model, before, source, batch, wrapped=wrapped, combiner=combiner, weighted=weighted
    )
    cases.take_step(model, tables, layer, source, batch)
    after = values()
    for name, table in expected.tables.items():
        np.testing.assert_allclose(after[name], table, atol=1e-6)
        changed = np.flatnonzero((after[name] != before[name]).any(1))
        np.testing.assert_array_equal(changed, np.sort(expected.chosen[name]))
