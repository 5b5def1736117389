"""Integers that an Input is too narrow for: Keras would cast them, and train the rows of others."""

import keras
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import BadExampleError, require
from dp_sparse.sampling import Examples


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
