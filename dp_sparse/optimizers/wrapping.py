"""What Keras expects of an optimizer, of one that wraps another."""

from typing import Any

import keras

from dp_sparse.optimizers.foreign_gradients import NoForeignGradients


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

    def finalize_variable_values(self, var_list: Any) -> None:
        """Overwrites dense variables by their moving average if the wrapped optimizer keeps one."""
        known = self.optimizer._trainable_variables
        self.optimizer.finalize_variable_values([v for v in var_list if any(v is k for k in known)])
