"""Weights read without a gradient, as constants of a forward pass.

What is computed from weights alone, as the error propagation of Re-Attention, reads them outside of
the layers that own them. The guards refuse that, since such a read would have a gradient that is
not recorded. Read by `detached` it has none.

### Formal Guarantees
A weight was released before the step that reads it. Nothing is computed from examples here, and no
gradient of what is read exists, recorded or not.
"""

import contextvars

import keras
import tensorflow as tf

from dp_sparse.clipping.graph_guard import recorded_operations
from dp_sparse.core import replicas

_READING = contextvars.ContextVar("detached", default=False)


def detached(variable: keras.Variable) -> tf.Tensor:
    """The value of a weight, float32, through which no gradient flows.

    Not for tables of lookups, which are read whole, and may wait for noise (LazyDP).
    """
    token = _READING.set(True)
    try:
        with recorded_operations([variable]):
            value = tf.convert_to_tensor(replicas.own_copy(variable.value))
            return tf.stop_gradient(tf.cast(value, tf.float32))
    finally:
        _READING.reset(token)


def reads_detached() -> bool:
    """Whether the variable that is being read is read by `detached`."""
    return _READING.get()
