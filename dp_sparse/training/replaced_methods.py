"""What a model or a loss does in place of Keras, so that the private step would leave it out.

`compile` refuses it, and `check_model` says it before.
"""

from typing import Any

import keras
import tensorflow as tf

_STEP = ("train_step", "compute_loss", "_compute_loss")


def replaced_methods(model: keras.Model, loss: Any) -> list[str]:
    """A line for each method that the private step would not run, with the fix.

    Args:
        model: Whose class may have a step or a loss of its own.
        loss: As `compile` takes it: nested losses, of which some may be None, names or functions.
    """
    lines = [
        f"{type(model).__name__} has a {name} of its own, which the private step would not run: "
        "remove it and pass loss= and metrics= to compile."
        for name in _STEP
        if _is_own(type(model), name)
    ]
    kinds = {type(each): each for each in tf.nest.flatten(loss)}
    return lines + [
        f"The loss {kind.__name__} has a __call__ of its own, which the private step would not "
        "run: put what it does into call(y_true, y_pred), which returns one value for each example."
        for kind in kinds
        if issubclass(kind, keras.losses.Loss) and _is_own(kind, "__call__")
    ]


def _is_own(kind: type, name: str) -> bool:
    """Whether a class, or what it inherits, has the method in place of Keras'."""
    owner = next(cls for cls in kind.__mro__ if name in vars(cls))
    return not owner.__module__.startswith("keras.")
