"""Of all gradients that a model makes, only the one that is pushed may reach a table, and once."""

import inspect
from collections.abc import Callable
from typing import Any

import keras_rs
import pytest
import tensorflow as tf

from dp_sparse import distribution
from dp_sparse.core.errors import PrivacyError
from dp_sparse.distribution.embedding_layers import layer_adapters
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import SparseCore, read


@pytest.fixture
def tables() -> distribution.PrivateTables:
    return two_tables.private_tables(two_tables.private_optimizer(), weighted=False)


def engine_and_layer(
    tables: distribution.PrivateTables,
) -> tuple[SparseCore, layer_adapters.RecordedLayer]:
    """A trap of our own, like those of the libraries."""
    engine, dummy = SparseCore(tables.feature_config, two_tables.INITIAL), tf.Variable([0.0])

    def call(features: Any, weights: Any) -> Any:
        @tf.custom_gradient
        def trap(dummy: tf.Tensor) -> Any:
            live, kept = engine(features, weights)

            def gradient(*gradients: tf.Tensor) -> tf.Tensor:
                sent = tf.nest.pack_sequence_as(live, gradients)
                engine.apply_gradients(sent, kept)
                return tf.zeros_like(dummy)

            return live, gradient

        return trap(dummy)

    return engine, layer_adapters.RecordedLayer(call, lambda: [dummy], None)


def features_of(tables: distribution.PrivateTables) -> Any:
    x, y = two_tables.data()
    del x["word_weights"]
    return two_tables.prepared(tables, (x, y))["features"]


@pytest.mark.parametrize("in_graph", [False, True])
def test_no_backward_pass_of_a_model_reaches_the_tables(
    in_graph: bool, tables: distribution.PrivateTables
) -> None:
    engine, layer = engine_and_layer(tables)
    features = features_of(tables)

    def backward() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            activations = layer.look_up(features, {}).activations
            tape.watch(activations)
            total = tf.add_n([tf.reduce_sum(a**2) for a in activations.values()])
        tape.gradient(total, [])
        return tape.gradient(total, activations)

    run: Callable[[], Any] = tf.function(backward, autograph=False) if in_graph else backward
    assert run()["left"].shape == (tables.examples, two_tables.WIDTH)
    assert int(engine.updates) == 0
    assert all((table == two_tables.INITIAL[name]).all() for name, table in read(engine).items())


def test_without_the_detachment_it_would(tables: distribution.PrivateTables) -> None:
    """The stand-in's trap is one: this is what the layers do with any other training."""
    engine, layer = engine_and_layer(tables)
    with tf.GradientTape() as tape:
        live = layer._call(features_of(tables), None)
        total = tf.reduce_sum(live["left"] ** 2)
    tape.gradient(total, live["left"])
    assert int(engine.updates) == 1


def test_a_gradient_is_pushed_once(tables: distribution.PrivateTables) -> None:
    engine, layer = engine_and_layer(tables)
    lookup = layer.look_up(features_of(tables), {})
    zeros = tf.nest.map_structure(tf.zeros_like, lookup.activations)
    lookup.push(zeros)
    assert int(engine.updates) == 1
    with pytest.raises(RuntimeError, match="can only be used to compute one set"):
        lookup.push(zeros)


def test_gradients_of_all_features_or_of_none(tables: distribution.PrivateTables) -> None:
    engine, layer = engine_and_layer(tables)
    lookup = layer.look_up(features_of(tables), {})
    with pytest.raises(ValueError, match="structure"):
        lookup.push({"left": tf.zeros_like(lookup.activations["left"])})
    assert int(engine.updates) == 0


def test_layers_of_another_configuration_are_refused(tables: distribution.PrivateTables) -> None:
    for config in (two_tables.tf_features(), two_tables.private_tables(tables.private_optimizer)):
        others = getattr(config, "feature_config", config)
        layer = two_tables.E.TPUEmbeddingForServing(others, two_tables.E.Adam())
        with pytest.raises(PrivacyError, match="made with tables.feature_config"):
            layer_adapters.layer_of(layer, tables)
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    assert isinstance(layer_adapters.layer_of(layer, tables), layer_adapters.RecordedLayer)


def test_options_of_an_engine_are_refused(tables: distribution.PrivateTables) -> None:
    layer = two_tables.E.TPUEmbeddingForServing(tables.feature_config, None)
    for name in layer_adapters.PIPELINING:
        setattr(layer, name, True)
        with pytest.raises(PrivacyError, match="pipeline_execution_with_tensor_core=False"):
            layer_adapters.layer_of(layer, tables)
        setattr(layer, name, False)
    layer._sparse_core_embedding_config = two_tables.E.SparseCoreEmbeddingConfig(
        allow_id_dropping=True
    )
    with pytest.raises(PrivacyError, match="allow_id_dropping=False"):
        layer_adapters.layer_of(layer, tables)
    layer._sparse_core_embedding_config = tables.sparse_core_config
    layer_adapters.layer_of(layer, tables)


def test_other_layers_are_refused(tables: distribution.PrivateTables) -> None:
    with pytest.raises(ValueError, match="DistributedEmbedding, got object"):
        layer_adapters.layer_of(object(), tables)


def test_tables_on_two_kinds_of_devices_are_refused(tables: distribution.PrivateTables) -> None:
    """As keras-rs keeps them where only some are wanted on SparseCores."""
    layer = type("DistributedEmbedding", (), {"__module__": "keras_rs.layers", "name": "both"})()
    layer._placement_to_path_to_feature_config = {"default_device": {}, "sparsecore": {}}
    with pytest.raises(
        ValueError, match=r"all tables of both on one kind of device, got \['default_device"
    ):
        layer_adapters.layer_of(layer, tables)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (two_tables.E.TPUEmbedding, "_pipeline_execution_with_tensor_core"),
        (two_tables.E.TPUEmbeddingV2, "_pipelining"),
        (two_tables.E.TPUEmbeddingV2, "_sparse_core_embedding_config"),
        (keras_rs.layers.DistributedEmbedding, "_pipeline_execution_with_tensor_core"),
    ],
)
def test_engines_keep_their_options_where_we_look(cls: type, name: str) -> None:
    """A contract with TensorFlow and keras-rs, whose engines cannot be made off TPU."""
    owners = [c for c in cls.__mro__[:-1] if c.__module__.startswith(("tensorflow", "keras_rs"))]
    assert any(f"self.{name} = " in inspect.getsource(owner) for owner in owners)
