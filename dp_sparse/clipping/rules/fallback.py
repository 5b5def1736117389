"""The rule for any other layer that works on each example alone: a vectorised per-example product.

The layer is called once more on each example, as a batch of one. That costs a second pass of this
layer, and memory batch × (its trainable parameters); above a budget the layer is refused. It is
also refused if it drew random numbers, since it cannot be called again with the same result, if its
second call uses a tensor of the whole batch, or if its outputs then have another shape.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import Explicit, GradientTerm
from dp_sparse.clipping.graph_guard import handles_of
from dp_sparse.clipping.tap import Tap
from dp_sparse.core import PrivacyError, UnsupportedLayerError, graphs, require

MEMORY_BUDGET = 2**29  # bytes of per-example gradients of one call


def call_any_layer(
    layer: keras.layers.Layer, call: Callable[..., Any], tap: Tap, *args: Any, **kwargs: Any
) -> Any:
    """Runs the layer's own call and records its inputs and outputs."""
    variables = [v for v in layer.trainable_variables if tap.trains(v)]
    again, inputs = _call_to_repeat(layer, variables, (args, kwargs))
    drawn = tap.seeds_drawn()
    outputs = call(*args, **kwargs)
    if tap.seeds_drawn() != drawn:
        raise UnsupportedLayerError(
            f"{_name(layer)}: has trainable variables, no rule of its own, and draws random "
            "numbers, so it cannot be called again for its per-example gradients. Move the "
            "randomness (dropout) into a layer of its own, or set it to 0."
        )
    flat_outputs = tf.nest.flatten(outputs)
    _refuse(layer, variables, [*inputs, *flat_outputs], tap.batch_capacity)

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        values = [tf.convert_to_tensor(variable.value) for variable in variables]
        _refuse_the_batch(again, values, inputs, flat_outputs)
        with tf.control_dependencies(_same_sizes(layer, [*inputs, *flat_outputs])):
            own = tf.nest.map_structure(tf.identity, (inputs, cotangents))
        per_example = _mapped(lambda example: again.gradients(values, *example), own)
        terms = zip(variables, per_example, strict=True)
        return [(variable, Explicit(tf.cast(gradient, tf.float32))) for variable, gradient in terms]

    tap.watch(flat_outputs, terms_of)
    return outputs


def _mapped(function: Callable[[Any], list[tf.Tensor]], examples: Any) -> list[tf.Tensor]:
    """`function` of each example; a single example is computed twice.

    TensorFlow's loops, as in an LSTMCell, cannot be vectorised over one element.
    """
    leaf = tf.nest.flatten(examples)[0]
    if leaf.shape[0] not in (None, 1):
        return tf.vectorized_map(function, examples)
    size = tf.shape(leaf)[0]

    def twice() -> Any:
        return tf.nest.map_structure(lambda values: tf.concat([values, values], 0), examples)

    def themselves() -> Any:
        return tf.nest.map_structure(tf.identity, examples)

    enough = twice() if leaf.shape[0] == 1 else tf.cond(tf.equal(size, 1), twice, themselves)
    return [values[:size] for values in tf.vectorized_map(function, enough)]


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a layer that can be made again with other tensors, with its masks, as in training.

    Attributes:
        layer: The layer.
        variables: The variables that train.
        arguments: `args` and `kwargs`.
        masked: For each tensor among the arguments, whether it has a Keras mask.
        context: Keras' call context for the layers inside, such as `training`.
    """

    layer: keras.layers.Layer
    variables: list[keras.Variable]
    arguments: Any
    masked: list[bool]
    context: dict[str, Any]

    def outputs(self, values: list[tf.Tensor], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The outputs of a batch; `tensors` are its inputs and then their masks."""
        inputs, masks = iter(tensors), iter(tensors[len(self.masked) :])
        for own, masked in zip(tensors, self.masked, strict=False):
            if masked:
                own._keras_mask = next(masks)
        args, kwargs = tf.nest.map_structure(
            lambda value: next(inputs) if tf.is_tensor(value) else value, self.arguments
        )
        mapping = list(zip(self.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping), self._as_before():
            return tf.nest.flatten(self.layer(*args, **kwargs))

    def gradients(
        self, values: list[tf.Tensor], tensors: list[tf.Tensor], cotangents: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The gradients of the variables for one example; arguments have no axis of the batch."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            outputs = self.outputs(values, [tensor[tf.newaxis] for tensor in tensors])
        pairs = zip(cotangents, outputs, strict=True)
        return tape.gradient(
            outputs,
            values,
            output_gradients=[tf.cast(c, o.dtype)[tf.newaxis] for c, o in pairs],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Gives the layers inside the same Keras context as in the model's own call."""
        context = self.layer._get_call_context()
        for name, value in self.context.items():
            context.set_value(name, value)
        try:
            yield
        finally:
            self.layer._maybe_reset_call_context()


def _call_to_repeat(
    layer: keras.layers.Layer, variables: list[keras.Variable], arguments: Any
) -> tuple[_Call, list[tf.Tensor]]:
    """The call that is being made, and its inputs, followed by their masks."""
    inputs = [value for value in tf.nest.flatten(arguments) if tf.is_tensor(value)]
    masks = [getattr(value, "_keras_mask", None) for value in inputs]
    context = {k: v for k, v in vars(layer._get_call_context()).items() if k != "entry_layer"}
    again = _Call(layer, variables, arguments, [mask is not None for mask in masks], context)
    return again, [*inputs, *(mask for mask in masks if mask is not None)]


def _refuse_the_batch(
    again: _Call, values: list[tf.Tensor], inputs: list[tf.Tensor], outputs: list[tf.Tensor]
) -> None:
    """Raises if the call on one example uses more of the batch, or does not give one example."""
    specs = [tf.TensorSpec([1, *value.shape[1:]], value.dtype) for value in inputs]
    traced = tf.function(again.outputs, autograph=False).get_concrete_function(values, specs)
    name, own = _name(again.layer), handles_of(again.variables)
    for outside, _ in traced.graph.captures:
        path = graphs.origin_of(outside, own)
        if path is not None:
            raise UnsupportedLayerError(
                f"{name}: uses {path} by .value, or in a function that was "
                "traced before (tf.function), where its gradient cannot be computed. Use the "
                "variable itself, and leave tf.function out."
            )
        if outside.dtype != tf.resource and not graphs.is_constant(outside):
            raise UnsupportedLayerError(
                f"{name}: uses {outside.name}, a tensor made outside of its call, which may hold "
                "the whole batch, so it cannot be called again on one example. Pass it as an "
                "argument of the call, or make it inside."
            )
    for one, whole in zip(traced.structured_outputs, outputs, strict=True):
        if one.shape[:1] != [1] or not one.shape[1:].is_compatible_with(whole.shape[1:]):
            raise UnsupportedLayerError(
                f"{name}: gives {one.shape} for one example and {whole.shape} for a batch, so the "
                "example's gradient is not known. Give outputs [batch, ...] of one shape."
            )


def _same_sizes(layer: keras.layers.Layer, tensors: list[tf.Tensor]) -> list[tf.Operation]:
    """Checks that all tensors have the same number of examples, now or when the step runs."""
    message = (
        f"{_name(layer)}: takes or gives tensors with {{}} and {{}} examples, so "
        "an example's own part is not known. Do not fold an axis into the batch."
    )
    known = {value.shape[0] for value in tensors} - {None}
    if len(known) > 1:
        raise UnsupportedLayerError(message.format(min(known), max(known)))
    if all(value.shape[0] is not None for value in tensors):
        return []
    sizes = tf.stack([tf.shape(value)[0] for value in tensors])
    least, most = tf.reduce_min(sizes), tf.reduce_max(sizes)
    return [require(tf.equal(least, most), PrivacyError, message, least, most)]


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
            f"bytes at a batch of {batch} (limit {MEMORY_BUDGET:,}). Use microbatch_size, build it "
            "from layers with rules (Dense, Embedding, LayerNormalization), or freeze it with "
            "trainable=False."
        )


def _name(layer: keras.layers.Layer) -> str:
    return f"{layer.path} ({type(layer).__name__})"
