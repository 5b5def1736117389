"""Which layers that could be tied output layers are: those that a model calls with `reverse=True`.

Models such as keras-hub's BERT hold their words in a layer that could multiply with its table but
only look rows up in it. A pass over the model tells, which is traced and computes nothing.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.core import replaced_call


def layers_called_with_reverse(
    model: keras.Model, layers: list[keras.layers.Layer]
) -> list[keras.layers.Layer]:
    """Those of `layers` whose tables the model reads whole; all of them if nothing tells.

    Args:
        model: Built, or with known inputs.
        layers: Layers inside it, each with `call(inputs, reverse=False)`.
    """
    signature = _signature(model) if layers else None
    if signature is None:
        return layers
    called: set[int] = set()
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_watched(layer, lambda own=layer: called.add(id(own))))  # type: ignore[misc]
        try:
            traced = tf.function(lambda x: model(x, training=True), autograph=False)
            traced.get_concrete_function(signature)
        except Exception:  # such as ids that are strings; what is not known is read whole
            return layers
    return [layer for layer in layers if id(layer) in called]


def _signature(model: keras.Model) -> Any:
    """What the model takes, of any number of examples, or None if nothing tells."""
    functional = getattr(model, "_functional", None) or model  # what a Sequential is inside
    inputs = getattr(functional, "_inputs_struct", None)
    if inputs is not None:
        return tf.nest.map_structure(
            lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), inputs
        )
    shapes = getattr(model, "_build_shapes_dict", None) or {}
    if len(shapes) != 1:
        return None
    (shape,) = shapes.values()
    of_ids = functools.partial(tf.TensorSpec, dtype=tf.int32)
    return keras.tree.map_shape_structure(of_ids, shape)


def _watched(
    layer: keras.layers.Layer, on_reverse: Callable[[], Any]
) -> contextlib.AbstractContextManager[None]:
    original = layer.call

    @functools.wraps(original)
    def call(inputs: Any, reverse: bool = False) -> Any:
        if reverse:
            on_reverse()
        return original(inputs, reverse=reverse)

    return replaced_call(layer, call)
