"""What Keras expects of an optimizer that wraps another, and what is refused of it."""

import dataclasses
from typing import Any, NoReturn

import keras
import tensorflow as tf

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers.row_updates import check_successor, gathered_by, same_slots


class NoForeignGradients(keras.optimizers.Optimizer):
    """A Keras optimizer that applies no gradients that others computed."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> NoReturn:
        """Refused: gradients that were not clipped and noised must not reach the weights."""
        raise PrivacyError(
            f"{type(self).__name__} got gradients that its private step did not make. Train with "
            f"model.fit after "
            "model.compile(optimizer=...), without a custom train_step, a hand-written loop, or "
            "an optimizer around it."
        )

    def apply_gradients(self, grads_and_vars: Any) -> NoReturn:
        """Refused, as `apply`."""
        self.apply(grads_and_vars)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> NoReturn:
        """Refused, as `apply`."""
        self.apply(grads)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> NoReturn:
        """Refused, as `apply`."""
        self.apply(gradient)


class WrappingOptimizer(NoForeignGradients):
    """Has the variables and the learning rate of the Keras optimizer that it wraps.

    Attributes:
        optimizer: The one that it wraps.
    """

    optimizer: keras.optimizers.Optimizer

    @property
    def variables(self) -> list[keras.Variable]:
        """Its own slots and count, then the wrapped optimizer's."""
        return [*self._variables, *self.optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.optimizer.learning_rate = value

    @property
    def iterations(self) -> keras.Variable:
        """The wrapped optimizer's."""
        return self.optimizer.iterations

    @property
    def inner_optimizer(self) -> keras.optimizers.Optimizer:
        """The wrapped optimizer, by the name at which Keras' SwapEMAWeights looks for averages."""
        return self.optimizer

    @property
    def slots(self) -> list[keras.Variable]:
        """What updates have gathered so far, without learning rates and a clip norm that moves."""
        return gathered_by(self.optimizer)

    def take_slots(self, previous: "WrappingOptimizer") -> None:
        """Goes on with the slots of the optimizer that trained the model on other data before.

        Takes accumulators, moments and their count of updates; not the learning rate, the spent
        steps or a key. Compile the model with this optimizer first.

        Raises:
            ValueError: `previous` has other slots, the same plan, or trained another model.

        ### Formal Guarantees
        Slots follow from noisy means, for which the plan of `previous` paid.
        """
        check_successor(self, previous)
        previous.before_publishing()  # what is taken over may be shown
        if not self.built:
            self.build(previous._trainable_variables)
        for own, other in same_slots(self.slots, previous.slots):
            own.assign(other.value)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Overwrites dense variables by their moving average if the wrapped optimizer keeps one."""
        known = self.optimizer._trainable_variables
        self.optimizer.finalize_variable_values([v for v in var_list if any(v is k for k in known)])


@dataclasses.dataclass(frozen=True)
class VariableSplit:
    """The model's trained variables, where Keras does not take them for those of the optimizer.

    Attributes:
        dense: Those that are no tables.
        tables: Those that are looked up alone.
    """

    dense: list[keras.Variable]
    tables: list[keras.Variable]


def regularised(gradient: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
    """The gradient, plus that of the variable's regulariser."""
    if variable.regularizer is None:
        return gradient
    value = tf.convert_to_tensor(variable.value)
    with tf.GradientTape() as tape:
        tape.watch(value)
        penalty = variable.regularizer(value)
    return gradient + tape.gradient(penalty, value)
