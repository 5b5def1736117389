"""What is asked of tensorflow_recommenders; each function runs in a process with legacy Keras."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from tensorflow_recommenders.layers.embedding import tpu_embedding_layer

from dp_sparse import distribution
from dp_sparse.core.errors import UnsupportedLayerError
from dp_sparse.distribution.embedding_layers import layer_adapters
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import SparseCore, read


def embedding_layer(tables: distribution.PrivateTables) -> Any:
    return tfrs.layers.embedding.TPUEmbedding(tables.feature_config, None)


def off_tpu(tables: distribution.PrivateTables) -> Any:
    layer = embedding_layer(tables)
    return layer, lambda: {t.name: v.numpy() for t, v in layer.embedding_tables.items()}


def on_sparse_cores(tables: distribution.PrivateTables) -> Any:
    """The layer's own code for TPUs, its gradient trap included, over the stand-in."""
    layer, engine = embedding_layer(tables), SparseCore(tables.feature_config, two_tables.INITIAL)
    layer._embedding_feature = tpu_embedding_layer._EMBEDDING_V2
    layer._tpu_embedding = engine
    dummy = tf.Variable([0.0])
    setattr(layer, tpu_embedding_layer._DUMMY_NAME, dummy)
    made = layer_adapters.RecordedLayer(layer._tpu_embedding_lookup, lambda: [dummy], None)
    return made, lambda: read(engine)


def updates() -> None:
    for make in (off_tpu, on_sparse_cores):
        for wrapped in ("sgd", "adagrad"):
            two_tables.assert_update(
                make, two_tables.tf_features("mean"), wrapped, "mean", weighted=True
            )


def ranking_of(tables: distribution.PrivateTables, **arguments: Any) -> Any:
    keras.utils.set_random_seed(4)
    mlp = tfrs.layers.blocks.MLP
    stacks = {
        "bottom_stack": mlp([6, two_tables.WIDTH], final_activation="tanh"),
        "top_stack": mlp([7, 1], final_activation="sigmoid"),
        **arguments,
    }
    return tfrs.experimental.models.Ranking(embedding_layer(tables), **stacks)


def ranking_update() -> None:
    """DotInteraction and Cross: the update is that of one gradient an example."""
    for arguments in ({}, {"feature_interaction": Crossed(), "concat_dense": False}):
        optimizer, source = two_tables.private_optimizer("adagrad"), two_tables.data()
        tables = two_tables.private_tables(optimizer)
        ranking = ranking_of(tables, **arguments)
        model = distribution.RankingModel(ranking, tables, num_dense=2)
        model.compile(optimizer, loss="binary_crossentropy")
        batch, layer = two_tables.prepared(tables, source), ranking._embedding_layer
        features = [batch["features"], batch["id_weights"]]
        layer_adapters.layer_of(layer, tables).look_up(*features)  # creates the tables
        before = {t.name: v.numpy() for t, v in layer.embedding_tables.items()}
        dense = [v.numpy() for v in ranking.dense_trainable_variables]
        expected = two_tables.expected_update(model, before, source, batch, wrapped="adagrad")
        two_tables.take_step(model, tables, layer, source, batch)
        for table, variable in layer.embedding_tables.items():
            np.testing.assert_allclose(variable.numpy(), expected.tables[table.name], atol=1e-6)
        assert len(dense) == len(model.trainable_variables) > 3
        for old, new in zip(dense, ranking.dense_trainable_variables, strict=True):
            assert (old != new.numpy()).any()


class Crossed(tf.keras.layers.Layer):
    """tfrs' cross layer over all features side by side."""

    def __init__(self) -> None:
        super().__init__()
        self._cross = tfrs.layers.feature_interaction.Cross(projection_dim=2)

    def call(self, inputs: Any) -> Any:
        return self._cross(tf.concat(inputs, 1))


def ranking_serves() -> None:
    """Trained by `train_tables`, it predicts by itself what the private model does."""
    optimizer, (x, y) = two_tables.private_optimizer(steps=5), two_tables.data()
    tables = two_tables.private_tables(optimizer, weighted=False)
    x = {name: values for name, values in x.items() if name != "word_weights"}
    ranking = ranking_of(tables)
    model = distribution.RankingModel(ranking, tables, num_dense=2)
    model.compile(optimizer, loss="binary_crossentropy", metrics=["AUC"])
    history = distribution.train_tables(model, tables, ranking._embedding_layer, (x, y))
    assert {"loss", "AUC"} <= {*history.history} and int(optimizer.steps_spent.numpy()) == 5
    inputs = distribution.model_inputs(tables, ranking._embedding_layer, x)
    words = tf.ragged.boolean_mask(tf.constant(x["words"]), x["words"] >= 0)
    sparse = {"left": tf.constant(x["left"]), "right": tf.constant(x["right"]), "words": words}
    served = ranking(
        {"dense_features": tf.constant(x["dense_features"]), "sparse_features": sparse}
    )
    np.testing.assert_allclose(model.predict(inputs, verbose=0)[:, 0], served.numpy(), rtol=1e-5)


def ranking_refusals() -> None:
    tables = two_tables.private_tables(two_tables.private_optimizer())
    layers, keras2 = tfrs.layers.blocks, tf.keras.layers
    regularised = tf.keras.Sequential(
        [keras2.Dense(two_tables.WIDTH, kernel_regularizer=tf.keras.regularizers.L2(0.1))]
    )
    normalised = tf.keras.Sequential([keras2.Dense(two_tables.WIDTH), keras2.BatchNormalization()])
    dropped = tf.keras.Sequential([keras2.Dense(two_tables.WIDTH), keras2.Dropout(0.5)])
    frozen = layers.MLP([two_tables.WIDTH])
    frozen.trainable = False
    for stack, message in (
        (regularised, "has a kernel_regularizer"),
        (normalised, "variables of Dense layers alone"),
        (dropped, "not secret"),
        (frozen, "trainable and float32"),
    ):
        ranking = ranking_of(tables, bottom_stack=stack)
        with pytest.raises(UnsupportedLayerError, match=message):
            distribution.RankingModel(ranking, tables, num_dense=2)
