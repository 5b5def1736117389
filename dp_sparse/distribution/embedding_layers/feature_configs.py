"""Feature and table configurations, of `tf.tpu.experimental.embedding` and of keras-rs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping

_COMBINERS = ("sum", "mean", "sqrtn")
_MOST_ROWS = 2**31  # TPUs take int32 ids


def num_rows(feature: Any) -> int:
    """Rows of a feature's table."""
    return int(feature.table.vocabulary_size)


def width(feature: Any) -> int:
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


def checked(
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
    if num_rows(feature) >= _MOST_ROWS:
        raise ValueError(
            f"Expected fewer than {_MOST_ROWS} rows, which TPUs can number, got "
            f"{num_rows(feature)} in {table.name!r}."
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
class Derived:
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
            return type(user)(name, self._table(user.table), ids, (rows, width(user)))
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
