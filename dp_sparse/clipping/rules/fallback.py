"""Any layer that works on each example alone: its per-example vector-Jacobian product, vectorised.

The layer is called once more on each example, as a batch of one, so it costs a second pass of this
layer and memory batch × (its trainable parameters); above a budget it is refused. A layer that drew
random numbers cannot be called again with the same result, and is refused too.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.tap import Tap
from dp_sparse.clipping.uses import Direct, Use
from dp_sparse.errors import UnsupportedLayerError

MEMORY_BUDGET = 2**29  # bytes of per-example gradients of one call


def call_any_layer(
    layer: keras.layers.Layer, call: Callable[..., Any], tap: Tap, *args: Any, **kwargs: Any
) -> Any:
    """Runs the layer's own call and records its inputs and outputs."""
    variables = [v for v in layer.trainable_variables if tap.trains(v)]
    drawn = tap.seeds_drawn()
    outputs = call(*args, **kwargs)
    if tap.seeds_drawn() != drawn:
        raise UnsupportedLayerError(
            f"{_name(layer)}: has trainable variables, no rule of its own, and draws random "
            f"numbers, so it cannot be called "
            "again for its per-example gradients. Move the randomness (dropout) into a layer of "
            "its own, or set it to 0."
        )
    flat_outputs = tf.nest.flatten(outputs)
    inputs = [value for value in tf.nest.flatten((args, kwargs)) if tf.is_tensor(value)]
    _refuse(layer, variables, [*inputs, *flat_outputs], tap.batch_capacity)

    def uses_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, Use]]:
        values = [tf.convert_to_tensor(variable.value) for variable in variables]

        def gradients(example: tuple[list[tf.Tensor], list[tf.Tensor]]) -> list[tf.Tensor]:
            tensors, cotangent = example
            return _one_example(call, (args, kwargs), variables, values, tensors, cotangent)

        per_example = tf.vectorized_map(gradients, (inputs, cotangents))
        uses = zip(variables, per_example, strict=True)
        return [(variable, Direct(tf.cast(gradient, tf.float32))) for variable, gradient in uses]

    tap.watch(flat_outputs, uses_of)
    return outputs


def _one_example(
    call: Callable[..., Any],
    arguments: tuple[Any, Any],
    variables: list[keras.Variable],
    values: list[tf.Tensor],
    tensors: list[tf.Tensor],
    cotangents: list[tf.Tensor],
) -> list[tf.Tensor]:
    remaining = iter(tensors)
    args, kwargs = tf.nest.map_structure(
        lambda value: next(remaining)[tf.newaxis] if tf.is_tensor(value) else value, arguments
    )
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            outputs = tf.nest.flatten(call(*args, **kwargs))
    cotangents = [tf.cast(c, o.dtype)[tf.newaxis] for c, o in zip(cotangents, outputs, strict=True)]
    return tape.gradient(
        outputs,
        values,
        output_gradients=cotangents,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )


def _refuse(
    layer: keras.layers.Layer,
    variables: list[keras.Variable],
    tensors: list[tf.Tensor],
    batch: int,
) -> None:
    name = _name(layer)
    if any(value.shape.rank == 0 for value in tensors):
        raise UnsupportedLayerError(
            f"{name}: takes or gives a tensor without a batch axis; pass constants as attributes."
        )
    needed = 4 * batch * sum(math.prod(variable.shape) for variable in variables)
    if needed > MEMORY_BUDGET:
        raise UnsupportedLayerError(
            f"{name}: has no rule of its own, and its per-example gradients would take {needed:,} "
            f"bytes at a batch of "
            f"{batch} (limit {MEMORY_BUDGET:,}). Use microbatch_size, build it from layers with "
            f"rules (Dense, Embedding, "
            "LayerNormalization), or freeze it with trainable=False."
        )


def _name(layer: keras.layers.Layer) -> str:
    return f"{layer.path} ({type(layer).__name__})"
