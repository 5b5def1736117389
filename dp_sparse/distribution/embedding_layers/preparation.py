"""What a run with an embedding layer needs before its first step: checks, variables, its data."""

from typing import Any

import keras
import tensorflow as tf

from dp_sparse.core import PrivacyError
from dp_sparse.distribution import epochs as epochs_of
from dp_sparse.distribution.embedding_layers.host_step import HostStep, other_inputs
from dp_sparse.distribution.embedding_layers.layer_adapters import TableLayer
from dp_sparse.distribution.embedding_layers.private_tables import PrivateTables, check_optimizer
from dp_sparse.sampling import batch_of
from dp_sparse.training import build_for


def check(model: keras.Model, tables: PrivateTables) -> None:
    """Raises PrivacyError or ValueError for what cannot be trained with these tables."""
    if not isinstance(tables, PrivateTables):
        raise ValueError(f"Expected tables to be PrivateTables, got {type(tables).__name__}.")
    if epochs_of.checked_optimizer(model) is not tables.private_optimizer:
        raise PrivacyError(
            f"Expected {model.name} compiled with the optimizer of its tables, got another: pass "
            "the same to PrivateTables and to compile."
        )
    check_optimizer(tables.private_optimizer)
    if tf.distribute.has_strategy():
        raise PrivacyError("Expected train_tables outside strategy.scope(), got it inside.")
    strategy = model._distribute_strategy
    if strategy is not None and not isinstance(strategy, tf.distribute.TPUStrategy):
        raise PrivacyError(
            f"Expected TPUStrategy or none, got {type(strategy).__name__}: elsewhere use "
            "keras.layers.Embedding, and fit."
        )
    count = 1 if strategy is None else strategy.num_replicas_in_sync
    if (count, strategy is not None) != (tables.replicas, tables.on_tpu):
        raise ValueError(
            f"Expected PrivateTables(strategy=...) with the strategy of {model.name}, got another."
        )
    if tables.private_optimizer.compiles:
        raise ValueError("Expected jit_compile=False, got True: a TPU compiles by itself.")
    last = tables.private_optimizer.outside_tables
    if [id(table) for table in last] != [id(table) for table in tables.tables]:
        raise PrivacyError(
            "Expected one PrivateTables of an optimizer, got an earlier one: make an optimizer and "
            "a plan for each."
        )


def build(model: keras.Model, tables: PrivateTables, layer: TableLayer, spec: Any) -> None:
    """Creates all variables, those of the layer too, before anything is traced."""
    examples, _ = batch_of(spec)
    x, size = examples.x, tables.examples
    nothing = tf.nest.map_structure(lambda of: tf.zeros([size, *of.shape[1:]], of.dtype), x)
    layer.build(*HostStep(tables).to_look_up(nothing))
    widths = {feature.name: table.width for table in tables.tables for feature in table.features}
    rows = tables.private_optimizer.plan.sampling.batch_capacity
    inputs = {name: tf.TensorSpec([rows, width]) for name, width in widths.items()}
    inputs = {**other_inputs(x, tables), **inputs}
    build_for(model, tables.private_optimizer, examples._replace(x=inputs))
    if tables.private_optimizer.tables:
        own = [table.path for table in tables.private_optimizer.tables]
        raise PrivacyError(
            f"Expected a model without embedding tables beside those of the layer, got {own}: rows "
            "are chosen over all tables at once. Make them tables of the layer."
        )


def distributed(model: keras.Model, dataset: tf.data.Dataset) -> Any:
    """The prepared batches, divided over the replicas of the model's strategy."""
    strategy = model._distribute_strategy
    if strategy is None:
        return dataset
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    return strategy.experimental_distribute_dataset(dataset, options)
