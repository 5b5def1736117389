"""What a rule uses to record a layer call: watch a tensor, and say what its cotangent will mean."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.uses import Use
from dp_sparse.core import UnsupportedLayerError

UsesOf = Callable[[list[tf.Tensor]], list[tuple[keras.Variable, Use]]]
BeforeLookup = Callable[[keras.Variable, tf.Tensor], None]  # given a table and the ids to be read


@dataclasses.dataclass(frozen=True)
class Record:
    """One layer call.

    Attributes:
        path: The layer's path, for errors.
        targets: Tensors whose cotangents the backward pass must give.
        uses_of: From those cotangents (float32) to the uses of the layer's trainable variables.
    """

    path: str
    targets: list[tf.Tensor]
    uses_of: UsesOf


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

    def watch(self, targets: Sequence[tf.Tensor], uses_of: UsesOf) -> None:
        """Asks for the cotangents of `targets`, and keeps what they will mean."""
        if _current_graph() is not self._graph:
            raise UnsupportedLayerError(
                f"{self.path}: called inside a loop, a branch or a function (tf.while_loop, "
                "tf.cond, map_fn, tf.function), where its per-example gradients cannot be "
                "recorded. Call the layer outside, or freeze it with trainable=False."
            )
        self._tape.watch(list(targets))
        self._records.append(Record(self.path, list(targets), uses_of))


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
