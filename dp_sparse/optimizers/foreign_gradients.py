"""Every road by which Keras hands gradients to an optimizer, closed."""

from typing import Any, NoReturn

import keras

from dp_sparse.errors import PrivacyError


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
