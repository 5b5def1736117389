"""What a model does in place of Keras, and integers that an Input is too narrow for.

`compile` and `check_model` refuse the first, since the private step would leave it out. Keras would
cast the second, and train the rows of others.
"""

from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import BadExampleError, require
from dp_sparse.sampling import Examples

_STEP = {
    "train_step": "put what it computes of a batch's losses into compute_loss(x, y, y_pred, "
    "sample_weight, training), which runs, and what it logs into metrics= of compile",
    "_compute_loss": "name it compute_loss",
}


def replaced_methods(model: keras.Model, loss: Any) -> list[str]:
    """A line for each method that the private step would not run, with the fix.

    Args:
        model: Whose class may have a step or a loss of its own.
        loss: As `compile` takes it: nested losses, of which some may be None, names or functions.
    """
    lines = [
        f"{type(model).__name__} has a {name} of its own, which the private step would not run: "
        f"{instead}."
        for name, instead in _STEP.items()
        if is_own(type(model), name)
    ]
    kinds = {type(each): each for each in tf.nest.flatten(loss)}
    return lines + [
        f"The loss {kind.__name__} has a __call__ of its own, which the private step would not "
        "run: put what it does into call(y_true, y_pred), which returns one value for each example."
        for kind in kinds
        if issubclass(kind, keras.losses.Loss) and is_own(kind, "__call__")
    ]


def is_own(kind: type, name: str) -> bool:
    """Whether a class, or what it inherits, has the method in place of Keras'."""
    owner = next(cls for cls in kind.__mro__ if name in vars(cls))
    return not owner.__module__.startswith("keras.")


def refuse_wrapped(model: keras.Model, examples: Examples) -> Examples:
    """The examples, which the step takes once all integers fit the model's inputs.

    Raises:
        BadExampleError: At run time, where one of an example that is there does not. It names the
            input, a value and the fix.
    """
    present, checks = examples.present > 0, []
    for place, given, dtype in clipping.typed_inputs(model, examples.x):
        integers = given.dtype.is_integer and dtype.is_integer
        if not integers or (dtype.min <= given.dtype.min and given.dtype.max <= dtype.max):
            continue
        values = tf.reshape(tf.boolean_mask(given, present), [-1])
        lost = values[tf.not_equal(tf.cast(tf.cast(values, dtype), given.dtype), values)]
        checks.append(
            require(
                tf.size(lost) < 1,
                BadExampleError,
                f"Expected integers of {place} within its Input's {dtype.name}, got {{}}: the rows "
                "of other ids would train.\nGive the Input dtype='int64', or map ids to fewer "
                "numbers.",
                tf.strings.as_string(lost[:1]),
            )
        )
    if not checks:
        return examples
    with tf.control_dependencies(checks):
        return tf.nest.map_structure(tf.identity, examples)
