"""Tables off a TPU: copies by way of a checkpoint, of every layout, and inputs made of them."""

from typing import Any

import keras_rs
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.tpu import tpu_embedding_v3_utils

from dp_sparse import distribution
from dp_sparse.distribution.embedding_layers.serving import copied
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import Strategy

CORES = 8


def test_inputs_of_a_model_that_was_trained() -> None:
    """More examples than a batch has; the same numbers as the layer's own."""
    tables, layer = two_tables.tables_and_layer()
    model = two_tables.compiled_model(tables.private_optimizer)
    x, _ = two_tables.data()
    twice = {name: np.concatenate([values, values]) for name, values in x.items()}
    inputs = distribution.model_inputs(tables, layer, twice)
    table = next(v for t, v in layer.embedding_tables.items() if t.name == "shared").numpy()
    np.testing.assert_allclose(inputs["left"], table[twice["left"]])
    np.testing.assert_array_equal(inputs["dense_features"], twice["dense_features"])
    assert model.predict(inputs, verbose=0).shape == (2 * two_tables.SIZE, 1)
    with pytest.raises(ValueError, match="inputs of one length.*'left': 19"):
        distribution.model_inputs(tables, layer, {**x, "left": x["left"][1:]})
    with pytest.raises(ValueError, match="inputs of one length, 1 or more"):
        distribution.model_inputs(tables, layer, {name: value[:0] for name, value in x.items()})
    with pytest.raises(ValueError, match="Expected inputs in a dictionary, .* got list"):
        distribution.model_inputs(tables, layer, [1, 2])


def test_tables_of_a_tpu_are_served_off_it() -> None:
    """Their configuration has no shapes of replicas, which inputs of any size would not fit."""
    optimizer = two_tables.private_optimizer()
    tables = two_tables.private_tables(optimizer, strategy=Strategy())
    layer = two_tables.E.TPUEmbeddingForServing(tables.serving_config, None)
    x, _ = two_tables.data()
    inputs = distribution.model_inputs(tables, layer, x)
    table = next(v for t, v in layer.embedding_tables.items() if t.name == "shared").numpy()
    np.testing.assert_allclose(inputs["right"], table[x["right"]])


class LaidOut(tf.Module):
    """Saved as a layer on SparseCores saves its tables: padded, each row on the core of its id."""

    def __init__(self, tables: dict[str, np.ndarray]) -> None:
        super().__init__()
        layouts = sparse_core_layout_pb2.SparseCoreTableLayouts()
        for name, values in tables.items():
            padded = np.pad(values, [(0, -len(values) % (8 * CORES)), (0, 8 - two_tables.WIDTH)])
            layouts.tables.add(
                table_name=name,
                stacked_table_name=f"{name}_stack",
                num_sparse_cores=CORES,
                unsharded_shape=values.shape,
                unsharded_padded_shape=padded.shape,
            )
            laid = tpu_embedding_v3_utils.shard_table(CORES, tf.constant(padded))
            self._track_trackable(tf.Variable(laid), f"{name}_stack")
        self._track_trackable(
            tpu_embedding_v3_utils.SparseCoreLayoutsTrackable(
                tf.constant(layouts.SerializeToString())
            ),
            tpu_embedding_v3_utils.SPARSECORE_LAYOUTS_CHECKPOINT_KEY,
        )


@pytest.mark.parametrize("on_sparse_cores", [False, True])
def test_a_copy_has_the_tables_as_they_are(on_sparse_cores: bool) -> None:
    tables = two_tables.private_tables(two_tables.private_optimizer("adagrad"), strategy=Strategy())
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(size=(rows, two_tables.WIDTH)).astype("float32")
        for name, rows in two_tables.ROWS.items()
    }
    if on_sparse_cores:
        layer: Any = LaidOut(values)
    else:
        layer = two_tables.E.TPUEmbeddingForServing(tables.serving_config, None)
        for table, variable in layer.embedding_tables.items():
            variable.assign(values[table.name])
    copy = copied(layer, tables)
    for table, variable in copy.embedding_tables.items():
        np.testing.assert_array_equal(variable, values[table.name])


def test_a_table_that_is_not_there_is_noticed() -> None:
    tables = two_tables.private_tables(two_tables.private_optimizer(), strategy=Strategy())
    with pytest.raises(ValueError, match="Expected the table 'shared' in a checkpoint of Module"):
        copied(tf.Module(), tables)
    half = LaidOut({"shared": np.zeros((two_tables.ROWS["shared"], two_tables.WIDTH), "float32")})
    with pytest.raises(ValueError, match="Expected the table 'bag' in a checkpoint of LaidOut"):
        copied(half, tables)


def test_off_a_tpu_it_is_the_layer_itself() -> None:
    tables, layer = two_tables.tables_and_layer()
    assert distribution.serving_layer(tables, layer) is layer


def test_layers_that_cannot_be_copied_are_refused() -> None:
    optimizer = two_tables.private_optimizer()
    tables = two_tables.private_tables(
        optimizer, two_tables.keras_rs_features(), strategy=Strategy()
    )
    layer = keras_rs.layers.DistributedEmbedding(tables.feature_config)
    with pytest.raises(ValueError, match="TPUEmbeddingV2 .* got DistributedEmbedding: read its"):
        distribution.serving_layer(tables, layer)
    with pytest.raises(ValueError, match="Expected the result of serving_layer, got Dist"):
        distribution.model_inputs(tables, layer, two_tables.data()[0])
