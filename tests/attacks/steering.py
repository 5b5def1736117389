"""What training measured on the batch, without noise, steers the update."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import DPSGDOptimizer
from tests.attacks.entries import REFUSED, Entry
from tests.attacks.measuring import Problem
from tests.attacks.towers import WIDTH, numbers, tower
from tests.attacks.ways import WAYS, Way, measured

_APART = tuple(way for way in WAYS if way != "graph")
_MODELS: list[keras.Model] = []  # the one that is trained
CLIP = 0.1


def known(make: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """A model that the attack can find again."""

    def model() -> keras.Model:
        return trains(make())

    return model


def trains(model: keras.Model) -> keras.Model:
    """The model, which attacks can find from now on."""
    _MODELS[:] = [model]
    return model


def model_that_trains() -> keras.Model | None:
    """The last that `known` made."""
    return _MODELS[0] if _MODELS else None


def forget_models() -> None:
    _MODELS.clear()


def training_loss() -> tf.Tensor:
    """The mean loss of the batches so far, which no noise covers."""
    return tf.cast(_MODELS[0].metrics[0].result(), tf.float32)


class ByTheLoss(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that falls with the training loss."""

    def __call__(self, step: Any) -> Any:
        return (1 / CLIP) * (1 + training_loss())

    def get_config(self) -> dict[str, Any]:
        return {}


class LossConstraint(keras.constraints.Constraint):
    """Weights are moved by the training loss after each update."""

    def __call__(self, weights: Any) -> Any:
        return weights + 0.1 * training_loss()


class LossRegularizer(keras.regularizers.Regularizer):
    """The same by the gradient of a regulariser."""

    def __call__(self, weights: Any) -> Any:
        return tf.reduce_sum(tf.convert_to_tensor(weights)) * training_loss()

    def get_config(self) -> dict[str, Any]:
        return {}


class OwnSGD(keras.optimizers.SGD):
    """An optimizer that adds the training loss to each update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient + training_loss(), variable, learning_rate)


class FollowsBack(keras.optimizers.SGD):
    """An optimizer that looks for what its gradients were computed from, before the noise."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        waiting, older = [gradient.op], []
        while waiting:
            op = waiting.pop(0)
            older += [t for t in op.outputs if t.shape == gradient.shape and t.dtype.is_floating]
            waiting += [source.op for source in op.inputs if source.op not in waiting]
        computed = [tensor for tensor in older if tensor.op.type != "ReadVariableOp"]
        before = tf.cast(computed[-1], tf.float32)
        super().update_step(gradient + 10.0 * before, variable, learning_rate)


class WritesWeights(keras.metrics.Metric):
    """A metric that moves the model's weights by what it sees."""

    def __init__(self) -> None:
        super().__init__(name="writes")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        kernel = _MODELS[0].trainable_variables[0]
        kernel.assign_add(0.1 * tf.ones_like(kernel) * tf.reduce_mean(tf.cast(y_true, tf.float32)))

    def result(self) -> Any:
        return tf.constant(0.0)


class WritesElsewhere(WritesWeights):
    """A metric that keeps what it sees in a weight that is saved and not trained."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        place = next(v for v in _MODELS[0].variables if "statistic" in v.path)
        place.assign_add(tf.reduce_sum(tf.cast(y_true, tf.float32)))


class Keeps(keras.layers.Layer):
    """Has a weight that nobody trains."""

    def build(self, shape: Any) -> None:
        self.add_weight(shape=(), initializer="zeros", trainable=False, name="statistic")

    def call(self, values: Any) -> Any:
        return values


def dense(**arguments: Any) -> Callable[[], keras.Model]:
    def model() -> keras.Model:
        inputs = keras.Input((WIDTH,))
        return keras.Model(inputs, keras.layers.Dense(1, **arguments)(inputs))

    return model


def keeping() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    return keras.Model(inputs, keras.layers.Dense(1)(Keeps()(inputs)))


def steered(
    make: Callable[[], keras.Model], wrapped: Any = None, **compiled: Any
) -> Callable[[Way], float]:
    """A problem of which something reads the training loss."""

    def attack(way: Way) -> float:
        fields = {} if wrapped is None else {"wrapped": wrapped(), "make": DPSGDOptimizer}
        problem = Problem(
            known(make),
            numbers(),
            removed=(1,),
            clip_norm=CLIP,
            optimizer=fields,
            compiled={name: value() for name, value in compiled.items()},
        )
        return measured(problem)(way)

    return attack


ENTRIES = [
    Entry(f"steering: {name}", attack, REFUSED, apart=_APART)
    for name, attack in [
        (
            "a learning rate by the training loss",
            steered(tower(), lambda: keras.optimizers.SGD(ByTheLoss())),
        ),
        (
            "a constraint that reads the training loss",
            steered(dense(kernel_constraint=LossConstraint())),
        ),
        (
            "a regulariser that reads the training loss",
            steered(dense(kernel_regularizer=LossRegularizer())),
        ),
        ("an optimizer that reads the training loss", steered(tower(), lambda: OwnSGD(1 / CLIP))),
        (
            "an optimizer that follows the graph back to the sums",
            steered(tower(), lambda: FollowsBack(1 / CLIP)),
        ),
        ("a metric that writes weights", steered(dense(), metrics=lambda: [WritesWeights()])),
        (
            "a metric that writes a weight that is not trained",
            steered(keeping, metrics=lambda: [WritesElsewhere()]),
        ),
    ]
]
