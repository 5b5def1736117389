"""Stand-ins for a TPU and its engines: one update for each row, of the sum of all its gradients."""

import types
from typing import Any

import numpy as np
import tensorflow as tf


class Strategy:
    """As much of a TPUStrategy as a configuration needs."""

    num_replicas_in_sync = 4

    def __init__(self, num_hosts: int = 1) -> None:
        self.extended = types.SimpleNamespace(num_hosts=num_hosts)


class SparseCore:
    """As `TPUEmbeddingV2`: gains are computed with the lookup, an update is counted.

    Args:
        config: A flat dictionary of `tf.tpu.experimental.embedding.FeatureConfig`s.
        tables: Initial weights.
    """

    def __init__(self, config: dict[str, Any], tables: dict[str, np.ndarray]) -> None:
        self.config = config
        made = {name: tf.constant(values, tf.float32) for name, values in tables.items()}
        self.tables = {name: tf.Variable(v, trainable=False) for name, v in made.items()}
        self.slots = {
            name: tf.Variable(tf.fill(v.shape, 0.2), trainable=False) for name, v in made.items()
        }
        self.updates = tf.Variable(0, trainable=False)

    def build(self) -> None:
        """It was."""

    def __call__(self, features: Any, weights: Any = None) -> tuple[Any, Any]:
        tf.nest.assert_same_structure(features, self.config)
        kept = {name: self._gains(name, x, weights) for name, x in features.items()}
        activations = {}
        for name, (rows, ids, gains, count) in kept.items():
            table = self.tables[self.config[name].table.name]
            values = tf.raw_ops.ResourceGather(resource=table.handle, indices=ids, dtype=tf.float32)
            activations[name] = tf.math.unsorted_segment_sum(gains[:, None] * values, rows, count)
        return activations, kept

    def apply_gradients(self, gradients: Any, preserved_outputs: Any) -> None:
        tf.nest.assert_same_structure(gradients, self.config)
        self.updates.assign_add(1)
        for name, table in self.tables.items():
            own = [f for f, config in self.config.items() if config.table.name == name]
            parts = [preserved_outputs[f] for f in own]
            ids = tf.concat([part[1] for part in parts], 0)
            sent = [
                part[2][:, None] * tf.gather(gradients[f], part[0])
                for f, part in zip(own, parts, strict=True)
            ]
            whole, backwards = (_summed(table.shape, *order) for order in _orders(ids, sent))
            with tf.control_dependencies([tf.debugging.assert_equal(whole, backwards)]):
                self._update(name, tf.identity(whole), tf.unique(ids)[0])

    def _update(self, name: str, gradient: tf.Tensor, rows: tf.Tensor) -> None:
        optimizer = next(c.table.optimizer for c in self.config.values() if c.table.name == name)
        rate, own = optimizer.learning_rate(), tf.gather(gradient, rows)
        if isinstance(optimizer, tf.tpu.experimental.embedding.Adagrad):
            self.slots[name].scatter_add(tf.IndexedSlices(own**2, rows))
            own /= tf.sqrt(tf.gather(self.slots[name], rows))
        self.tables[name].scatter_sub(tf.IndexedSlices(rate * own, rows))

    def _gains(self, name: str, x: Any, weights: Any) -> tuple[Any, ...]:
        if not isinstance(x, tf.RaggedTensor):
            return tf.range(tf.size(x)), x, tf.ones(tf.shape(x)), tf.size(x)
        rows, count = x.value_rowids(), tf.cast(x.nrows(), tf.int32)
        own = weights[name] if weights else None
        given = tf.ones(tf.shape(x.values)) if own is None else own.values
        powers = {"sum": 0, "mean": 1, "sqrtn": 2}
        power = powers[self.config[name].table.combiner]
        divisor = tf.math.unsorted_segment_sum(given**power, rows, count)
        divisor = {0: tf.ones_like(divisor), 1: divisor, 2: tf.sqrt(divisor)}[power]
        gains = tf.math.divide_no_nan(given, tf.gather(divisor, rows))
        return rows, x.values, gains, count


def _orders(ids: tf.Tensor, sent: list[tf.Tensor]) -> Any:
    """What cores may add up in one order, or in another: the sums must not tell which."""
    values = tf.concat(sent, 0)
    return (ids, values), (tf.reverse(ids, [0]), tf.reverse(values, [0]))


def _summed(shape: Any, ids: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_add(tf.zeros(shape), ids[:, None], values)  # one after another


def read(engine: SparseCore) -> dict[str, np.ndarray]:
    """The tables of an engine, after one update at the most."""
    assert int(engine.updates) <= 1
    return {name: table.numpy() for name, table in engine.tables.items()}


class TensorCore(SparseCore):
    """As `TPUEmbedding`: a queue, whose step has one enqueue, one dequeue and one gradient."""

    _kept: Any = None

    def enqueue(self, features: Any, weights: Any = None, training: bool = True) -> None:
        assert training and self._kept is None
        self._activations, self._kept = self(features, weights)

    def dequeue(self) -> Any:
        return self._activations

    def apply_gradients(self, gradients: Any) -> None:  # type: ignore[override]
        kept, self._kept = self._kept, None
        super().apply_gradients(gradients, kept)
