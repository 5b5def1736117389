"""Steps that the graph guard reads: a layer that does what it is given, and an update likewise."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import DPSGDOptimizer
from dp_sparse.clipping.graph_guard import update_from
from tests.training_cases import marked_dataset, plan_for

SIZE = 6


def features(width: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SIZE, width)).astype(np.float32), rng.normal(size=SIZE).astype("f")


class Calls(keras.layers.Layer):
    """A layer that does something with its inputs; `build` and `do` share `self`."""

    def __init__(self, do: Callable[..., Any], make: Callable[..., Any] | None = None) -> None:
        super().__init__(name="does_it")
        self._do, self._make, self.made = do, make, None

    def build(self, shape: Any) -> None:
        with tf.init_scope():
            self.made = self._make(self) if self._make is not None else None

    def compute_output_spec(self, inputs: Any) -> Any:
        """Else Keras would call it to learn this."""
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs: Any) -> Any:
        given = self._do(self, inputs)
        return given if tf.is_tensor(given) else inputs


def model_with(layer: keras.layers.Layer, width: int = 3) -> keras.Model:
    return keras.Sequential(
        [keras.Input((width,)), layer, keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )


def train(model: keras.Model, loss: Any = "mse", steps: int = 1, **arguments: Any) -> None:
    """One step or more of DP-SGD by `fit`."""
    microbatch_size = arguments.pop("microbatch_size", None)
    plan = plan_for(SIZE)
    sgd = keras.optimizers.SGD(0.1)
    optimizer = DPSGDOptimizer(sgd, plan, 1.0, microbatch_size=microbatch_size)
    model.compile(optimizer, loss=loss, **arguments)
    model.fit(marked_dataset(plan, *features(), steps=steps), verbose=0)
    assert int(optimizer.diagnostics.steps) == steps


def column_sums(values: tf.Tensor) -> tf.Tensor:
    """What is computed of a batch, by default."""
    return tf.reduce_sum(values, 0)


def updating(
    change: Callable[..., Any],
    computed: Callable[[tf.Tensor], tf.Tensor] = column_sums,
    leaves: bool = False,
) -> tf.types.experimental.ConcreteFunction:
    """A step whose update assigns what `change` makes of allowed data, other data and weights.

    Args:
        change: What is assigned.
        computed: What the other data are, of the batch.
        leaves: Whether the change is used elsewhere, and not assigned in the update.
    """
    weights = tf.Variable(tf.ones([3]))

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        allowed, other = tf.reduce_sum(x, 0), computed(y)
        with update_from([allowed]) as leaving:
            changed = tf.convert_to_tensor(change(allowed, other, weights))
            if leaves:
                leaving.append(changed)
            else:
                weights.assign(changed)

    spec = tf.TensorSpec([None, 3])
    return step.get_concrete_function(spec, spec)
