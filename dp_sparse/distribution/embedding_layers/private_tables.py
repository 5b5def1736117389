"""The configuration of an embedding layer: the user's features, and those for noise and updates.

Features and tables may be of `tf.tpu.experimental.embedding` or of keras-rs.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.clipping import AutomaticClipping, FlatClipping
from dp_sparse.core import PrivacyError
from dp_sparse.distribution.embedding_layers.rounding_grid import RoundingGrid, RowUpdates
from dp_sparse.optimizers import DPAdaFESTOptimizer

_COMBINERS = ("sum", "mean", "sqrtn")
_MOST_ROWS = 2**31  # TPUs take int32 ids
# That of Keras' Adagrad; the Adagrad of embedding layers has no epsilon.
_EPSILON = inspect.signature(keras.optimizers.Adagrad).parameters["epsilon"].default
_CORES = 8  # at most so many SparseCores divide the ids of a replica


def rows_of(feature: Any) -> int:
    """Rows of a feature's table."""
    return int(feature.table.vocabulary_size)


def width_of(feature: Any) -> int:
    """The width of a row of a feature's table."""
    return int(feature.table.embedding_dim if _of_keras_rs(feature) else feature.table.dim)


def layer_optimizer(own: keras.optimizers.Optimizer) -> Any:
    """The layer's own SGD or Adagrad, with the learning rate of the user's."""

    def learning_rate() -> tf.Tensor:
        with clipping.update_from([]) as leaving:  # a schedule is code of users
            leaving.append(tf.convert_to_tensor(own.learning_rate, tf.float32))
        return leaving[0]

    if isinstance(own, keras.optimizers.SGD):
        return tf.tpu.experimental.embedding.SGD(learning_rate)
    return tf.tpu.experimental.embedding.Adagrad(learning_rate, own.initial_accumulator_value)


def checked_features(
    features: Mapping[str, Any], bags: Mapping[str, int], weights: Mapping[str, str]
) -> dict[str, Any]:
    """The features, if each can be trained privately.

    Raises:
        ValueError: A feature cannot be; the message has its name, the value and the fix.
    """
    if not features:
        raise ValueError("Expected at least one feature, got none.")
    for name, keys in (("bags", bags), ("weights", weights)):
        unknown = sorted(set(keys) - set(features))
        if unknown:
            raise ValueError(f"Expected {name} of features, got {unknown[0]!r}, which is none.")
    loose = sorted(set(weights) - set(bags))
    if loose:
        raise ValueError(f"Expected weights for bags only, got some for {loose[0]!r}, not in bags.")
    for name, most in bags.items():
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ValueError(f"Expected bags[{name!r}] >= 1, the most ids, got {most!r}.")
    tables: dict[str, Any] = {}
    for name, feature in features.items():
        _check_feature(name, feature)
        if tables.setdefault(feature.table.name, feature.table) is not feature.table:
            raise ValueError(
                f"Expected one table of each name, got two named {feature.table.name!r}: features "
                "use a common table by having the same TableConfig."
            )
    return dict(features)


def _check_feature(name: str, feature: Any) -> None:
    known = _of_keras_rs(feature) or isinstance(
        feature, tf.tpu.experimental.embedding.FeatureConfig
    )
    if not known:
        raise ValueError(
            f"Expected FeatureConfigs of tf.tpu.experimental.embedding or keras_rs, got "
            f"{type(feature).__name__} for {name!r}, in a flat dictionary."
        )
    table = feature.table
    if not table.name:
        raise ValueError(f"Expected tables with names, got one without for {name!r}: name it.")
    if rows_of(feature) >= _MOST_ROWS:
        raise ValueError(
            f"Expected fewer than {_MOST_ROWS} rows, which TPUs can number, got "
            f"{rows_of(feature)} in {table.name!r}."
        )
    if table.combiner not in _COMBINERS:
        raise ValueError(
            f"Expected a combiner of {_COMBINERS} for {table.name!r}, got {table.combiner!r}."
        )
    if getattr(feature, "max_sequence_length", 0):
        raise ValueError(
            f"Expected max_sequence_length=0 for {name!r}, got {feature.max_sequence_length}: give "
            "each position of the sequence a feature, all with the same table."
        )
    for option in ("quantization_config", "layout"):
        if getattr(table, option, None) is not None:
            raise ValueError(f"Expected no {option} for {table.name!r}, got one: leave it out.")
    dtype = tf.as_dtype(getattr(table, "dtype", None) or tf.float32)
    if dtype != tf.float32:
        raise ValueError(f"Expected float32 for {table.name!r}, got {dtype.name}.")
    if table.optimizer not in (None, "adam"):  # keras-rs' default
        raise ValueError(
            f"Expected no optimizer for {table.name!r}, got {table.optimizer!r}: tables are "
            "updated by the private optimizer. Leave it out."
        )


@dataclasses.dataclass
class DerivedFeatures:
    """Makes configurations like the user's, with another optimizer.

    Attributes:
        optimizer: The optimizer of all tables.
        replicas: How many replicas a batch is divided among on a TPU, which needs shapes
            beforehand; None off TPU.
    """

    optimizer: Any
    replicas: int | None
    _tables: dict[str, Any] = dataclasses.field(default_factory=dict)

    def feature(self, user: Any, name: str, ragged: bool, rows: int) -> Any:
        """A feature of the same table with `rows` output rows; `ragged` if some may have no id."""
        if _of_keras_rs(user):
            ids = (rows, None) if ragged else (rows,)
            return type(user)(name, self._table(user.table), ids, (rows, width_of(user)))
        return tf.tpu.experimental.embedding.FeatureConfig(
            self._table(user.table),
            validate_weights_and_indices=user.validate_weights_and_indices,
            output_shape=[rows // self.replicas] if self.replicas else None,
            name=name,
        )

    def _table(self, user: Any) -> Any:
        if user.name not in self._tables:
            self._tables[user.name] = self._new_table(user)
        return self._tables[user.name]

    def _new_table(self, user: Any) -> Any:
        if not isinstance(user, tf.tpu.experimental.embedding.TableConfig):
            return dataclasses.replace(user, optimizer=self.optimizer)
        return tf.tpu.experimental.embedding.TableConfig(
            user.vocabulary_size,
            user.dim,
            initializer=user.initializer,
            optimizer=self.optimizer,
            combiner=user.combiner,
            name=user.name,
        )


def _of_keras_rs(feature: Any) -> bool:
    return type(feature).__module__.startswith("keras_rs.")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One of the user's features.

    Attributes:
        name: Its key in the inputs and in the layer's configuration.
        most_ids: The most ids of an example.
        bag: Whether an example may have any number of ids up to `most_ids`, and not exactly one.
        combiner: How a bag's rows are reduced: "sum", "mean" or "sqrtn".
        weights: The key of its ids' weights in the inputs, if it has weights.
    """

    name: str
    most_ids: int
    bag: bool
    combiner: str
    weights: str | None

    @property
    def backward(self) -> str:
        """The name of the feature that updates a bag's table, with one id for each output row."""
        return f"private_backward_{self.name}"


@dataclasses.dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        path: Its name.
        num_rows: How many rows it has.
        width: The width of a row.
        features: The user's features that look up rows in it.
        capacity: The most rows that a step can select, by all lookups of a batch and by noise.
    """

    path: str
    num_rows: int
    width: int
    features: tuple[Feature, ...]
    capacity: int

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and their width."""
        return self.num_rows, self.width

    @property
    def noise(self) -> str:
        """The name of the feature whose ids are the selected rows and whose gradients are noise."""
        return f"private_noise_{self.path}"


class PrivateTables(tf.Module):
    """Embedding tables for `train_tables`, from the features of an embedding layer.

    Args:
        features: A flat dictionary from names to `FeatureConfig`s, of
            `tf.tpu.experimental.embedding` or of keras-rs. Tables need names, and no optimizer:
            `optimizer` updates them.
        optimizer: A `DPAdaFESTOptimizer` over all rows. Its `table_optimizer`, or else the
            optimizer that it wraps, must be Keras' SGD or Adagrad.
        bags: For each feature with several ids, the most ids of an example. Its inputs are
            `[batch, most]`, padded with -1; those of other features `[batch]` or `[batch, 1]`.
        weights: For bags whose ids have weights >= 0, the key of the weights in the inputs.
        strategy: The `TPUStrategy` under which the layer is made; None off TPU.

    Attributes:
        tables: The tables, in the order of their first feature.
        private_optimizer: The argument `optimizer`.
        layer_optimizer: The optimizer of the layer's tables, with the private one's learning rate.
        on_tpu: Whether there is a strategy.
        replicas: How many replicas each batch is divided among.
        grid: The grid to which gradients and noise of rows are rounded.
        updates: What updates the tables off TPU; `tf.train.Checkpoint(tables=...)` keeps its slots.
        examples: Examples of a batch, padding included: the plan's capacity, in whole shards.

    Raises:
        ValueError: A feature or table that cannot be trained privately; batches or bags so large
            that float32 cannot sum them exactly.
        PrivacyError: Another optimizer or clipping style, or a TPU with several hosts.

    Examples:
        >>> import dp_sparse, tensorflow as tf
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0)
        >>> E = tf.tpu.experimental.embedding
        >>> user = E.FeatureConfig(E.TableConfig(10, 2, name="users"), name="user")
        >>> tables = dp_sparse.distribution.PrivateTables({"user": user}, optimizer)
        >>> sorted(tables.feature_config)  # what to make the layer with
        ['private_noise_users', 'user']

    ### Formal Guarantees
    `feature_config` adds two kinds of features. For each table, one for noise, with room for every
    row that any batch can select, so its size reveals nothing. For each bag, one with its selected
    ids, one id for each output row; an example's second id of the same row gets no gradient. Only
    SGD and Adagrad update tables: they do not change a row without a gradient, and Adagrad squares
    the sum of a row's gradients.
    """

    def __init__(
        self,
        features: Mapping[str, Any],
        optimizer: DPAdaFESTOptimizer,
        *,
        bags: Mapping[str, int] | None = None,
        weights: Mapping[str, str] | None = None,
        strategy: tf.distribute.TPUStrategy | None = None,
    ) -> None:
        super().__init__()
        check_optimizer(optimizer)
        _refuse_several_hosts(strategy)
        self.private_optimizer = optimizer
        self.on_tpu = strategy is not None
        self.replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        self.examples = self.in_whole_shards(optimizer.plan.sampling.batch_capacity)
        self._configs = checked_features(features, bags or {}, weights or {})
        self.tables = self._tables(bags or {}, weights or {})
        self._refuse_taken_names()
        optimizer.outside_tables = self.tables
        self.grid = self._grid()
        own = optimizer.table_optimizer or optimizer.optimizer
        self.layer_optimizer = layer_optimizer(own)
        self.updates = RowUpdates(self.layer_optimizer)
        self._frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses changes: noise, clipping and layout are traced at different times."""
        if getattr(self, "_frozen", False) and not name.startswith("_"):
            raise AttributeError(f"PrivateTables.{name} cannot change: make another PrivateTables.")
        super().__setattr__(name, value)

    @property
    def features(self) -> list[Feature]:
        """The user's features, table by table."""
        return [feature for table in self.tables for feature in table.features]

    def _grid(self) -> RoundingGrid:
        optimizer = self.private_optimizer
        ids = [(sum(f.most_ids for f in table.features), table.width) for table in self.tables]
        return RoundingGrid(
            optimizer.clip_norm,
            optimizer.clip_norm * optimizer.gradient_noise_multiplier,
            optimizer.plan.sampling.expected_batch_size,
            self.examples,
            math.sqrt(sum(own * width for own, width in ids)),
        )

    @property
    def feature_config(self) -> dict[str, Any]:
        """The features to make the layer with: `features`, and those for noise and bags."""
        return self._features_for(self.replicas if self.on_tpu else None)

    @property
    def serving_config(self) -> dict[str, Any]:
        """The same for a `TPUEmbeddingForServing` that takes over the tables of a TPU."""
        return self._features_for(None)

    def _features_for(self, replicas: int | None) -> dict[str, Any]:
        derived = DerivedFeatures(self.layer_optimizer, replicas)
        found = {}
        for table in self.tables:
            for feature in table.features:
                user, name = self._configs[feature.name], feature.name
                found[name] = derived.feature(user, name, feature.bag, self.examples)
                if feature.bag:
                    ids = self.examples * feature.most_ids
                    found[feature.backward] = derived.feature(user, feature.backward, True, ids)
            user = self._configs[table.features[0].name]
            found[table.noise] = derived.feature(user, table.noise, True, table.capacity)
        return found

    @property
    def sparse_core_config(self) -> Any:
        """For SparseCores: room for all ids that a batch can have, so that none is dropped."""
        room = {table.path: self._ids_of_a_core(table) for table in self.tables}
        return tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(
            disable_table_stacking=True,
            max_ids_per_chip_per_sample=max(feature.most_ids for feature in self.features),
            max_ids_per_table=room,
            max_unique_ids_per_table=room,
            allow_id_dropping=False,
        )

    def _ids_of_a_core(self, table: Table) -> int:
        """The most ids that one core sends another: all that it has, a bag's twice."""
        ids = sum(f.most_ids * (2 if f.bag else 1) for f in table.features)
        return (self.examples * ids + table.capacity) // self.replicas

    def in_whole_shards(self, count: int) -> int:
        """`count`, rounded up to a multiple of 8 for each replica, which SparseCores require."""
        return math.ceil(count / self.shards) * self.shards

    @property
    def shards(self) -> int:
        """How many parts the selected rows of a table are divided into."""
        return _CORES * self.replicas

    def _tables(self, bags: Mapping[str, int], weights: Mapping[str, str]) -> list[Table]:
        users: dict[str, list[str]] = {}
        for name, config in self._configs.items():
            users.setdefault(config.table.name, []).append(name)
        tables = []
        sizes = {n: rows_of(self._configs[f[0]]) for n, f in users.items()}
        false_rows = self.private_optimizer.most_false_rows(sum(sizes.values()))
        begun = self.private_optimizer.first_rows
        first_rows = {} if begun is None else {n: len(rows) for n, rows in begun.row_ids.items()}
        for path, names in users.items():
            features = tuple(
                Feature(
                    name,
                    bags.get(name, 1),
                    name in bags,
                    self._configs[name].table.combiner,
                    weights.get(name),
                )
                for name in names
            )
            ids = self.examples * sum(feature.most_ids for feature in features)
            most = max(ids + false_rows, first_rows.get(path, 0))
            capacity = self.in_whole_shards(min(sizes[path], most))
            width = width_of(self._configs[names[0]])
            tables.append(Table(path, sizes[path], width, features, capacity))
        return tables

    def _refuse_taken_names(self) -> None:
        ours = {table.noise for table in self.tables} | {f.backward for f in self.features}
        taken = sorted(ours & set(self._configs))
        if taken:
            raise ValueError(f"Expected features of other names, got {taken[0]!r}: rename it.")


def check_optimizer(optimizer: Any) -> None:
    """Raises PrivacyError unless the tables of a layer can be trained by `optimizer`."""
    if type(optimizer) is not DPAdaFESTOptimizer or optimizer.rows is not None:
        raise PrivacyError(
            f"Expected a DPAdaFESTOptimizer without rows=, got {type(optimizer).__name__}: rows "
            "are selected by ids alone, before the step, and noise has a fixed number of rows."
        )
    if type(optimizer.clipping) not in (FlatClipping, AutomaticClipping):
        raise PrivacyError(
            f"Expected FlatClipping or AutomaticClipping, got {type(optimizer.clipping).__name__}: "
            "the noise of rows is drawn before the step, for one clip norm of all variables."
        )
    if optimizer.microbatch_size is not None:
        raise PrivacyError(
            f"Expected microbatch_size=None, got {optimizer.microbatch_size}: an embedding layer "
            "takes the gradients of a whole batch at once."
        )
    own = optimizer.table_optimizer or optimizer.optimizer
    if type(own) not in (keras.optimizers.SGD, keras.optimizers.Adagrad):
        raise PrivacyError(
            f"Expected SGD or Adagrad for the tables, got {type(own).__name__}, which changes "
            "rows without a gradient, and so reveals which rows were looked up. Pass "
            "table_optimizer=keras.optimizers.Adagrad(...)."
        )
    if getattr(own, "epsilon", _EPSILON) != _EPSILON:
        raise PrivacyError(
            f"Expected Adagrad's default epsilon for the tables, got {own.epsilon}: the "
            "Adagrad of embedding layers has no epsilon. Leave it out."
        )


def _refuse_several_hosts(strategy: tf.distribute.TPUStrategy | None) -> None:
    hosts = 1 if strategy is None else strategy.extended.num_hosts
    if hosts > 1:
        raise PrivacyError(
            f"Expected a TPU with one host, got {hosts}: each would select rows and draw noise "
            "with its own key, for its own part of a batch. Use a smaller slice."
        )
