"""What a rule uses to record a layer call: watch a tensor, and say what its cotangent will mean.

It also reads weights without a gradient, as constants of a forward pass.

What is computed from weights alone, as the error propagation of Re-Attention, reads them outside of
the layers that own them. The guards refuse that, since such a read would have a gradient that is
not recorded. Read by `stop_gradient_read` it has none.

### Formal Guarantees
A weight was released before the step that reads it. Nothing is computed from examples here, and no
gradient of what is read exists, recorded or not.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import GradientTerm
from dp_sparse.clipping.graph_guard import recorded_operations
from dp_sparse.core import UnsupportedLayerError, replicas

TermsOf = Callable[[list[tf.Tensor]], list[tuple[keras.Variable, GradientTerm]]]
BeforeLookup = Callable[[keras.Variable, tf.Tensor], None]  # given a table and the ids to be read
_READING = contextvars.ContextVar("detached", default=False)


@dataclasses.dataclass(frozen=True)
class Record:
    """One layer call.

    Attributes:
        path: The layer's path, for errors.
        targets: Tensors whose cotangents the backward pass must give.
        terms_of: From those cotangents (float32) to the terms of the layer's trainable variables.
    """

    path: str
    targets: list[tf.Tensor]
    terms_of: TermsOf


class Tap:
    """Records the calls of one layer on a tape."""

    def __init__(
        self,
        layer: keras.layers.Layer,
        tape: tf.GradientTape,
        records: list[Record],
        batch_capacity: int,
        seeds_drawn: Callable[[], int],
        before_lookup: BeforeLookup,
    ) -> None:
        self.path = layer.path
        self.batch_capacity = batch_capacity
        self.seeds_drawn = seeds_drawn  # by the pass so far, for dropout and the like
        self.before_lookup = before_lookup  # to be called before rows of a table are read
        self._tape = tape
        self._records = records
        self._graph = _current_graph()
        self._trainable = {id(variable) for variable in layer.trainable_variables}

    def trains(self, variable: keras.Variable | None) -> bool:
        """Whether a gradient of `variable` is wanted."""
        return variable is not None and id(variable) in self._trainable

    def watch(self, targets: Sequence[tf.Tensor], terms_of: TermsOf) -> None:
        """Asks for the cotangents of `targets`, and keeps what they will mean."""
        if _current_graph() is not self._graph:
            raise UnsupportedLayerError(
                f"{self.path}: called inside a loop, a branch or a function (tf.while_loop, "
                "tf.cond, map_fn, tf.function), where its per-example gradients cannot be "
                "recorded. Call the layer outside, or freeze it with trainable=False."
            )
        self._tape.watch(list(targets))
        self._records.append(Record(self.path, list(targets), terms_of))


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def stop_gradient_read(variable: keras.Variable) -> tf.Tensor:
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


def is_stop_gradient_read() -> bool:
    """Whether the variable that is being read is read by `stop_gradient_read`."""
    return _READING.get()
