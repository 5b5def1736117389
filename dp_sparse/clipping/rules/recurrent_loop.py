"""Keras' own loop over time with another step: Keras handles masks, states, direction, flags."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# From a step's projected input and states to its new states (the output first) and to what the uses
# need to know of the step (h_{t-1} first), all [batch, units].
Step = Callable[[tf.Tensor, list[tf.Tensor]], tuple[list[tf.Tensor], list[tf.Tensor]]]


def looped(
    layer: Any, step: Step, projected: tf.Tensor, initial_state: Any, mask: tf.Tensor | None
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """Keras' own loop of `step`: the outputs, the last states, and what the steps reported.

    The outputs `[batch, time, units]` are the last state alone if the layer returns only that; then
    no gradient passes through the outputs of all steps. Reports leave the loop in the same way as
    outputs, so the loop must not set those of masked steps to zero.
    """
    all_outputs = layer.return_sequences

    def call(
        projected: tf.Tensor, states: Sequence[tf.Tensor], **kwargs: Any
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        new_states, reported = step(projected, list(states))
        own = new_states[:1] if all_outputs else []
        return tf.concat([*own, *map(tf.stop_gradient, reported)], axis=-1), new_states

    with (
        swapped(layer.cell, "call", call),
        swapped(layer, "return_sequences", True),
        swapped(layer, "zero_output_for_mask", False),
    ):
        _, joint, states = keras.layers.RNN.inner_loop(layer, projected, initial_state, mask)
    parts = tf.split(joint, joint.shape[-1] // layer.cell.units, axis=-1)
    outputs = parts.pop(0) if all_outputs else states[0][:, tf.newaxis]
    reports = [tf.reverse(part, [1]) if layer.go_backwards else part for part in parts]
    return outputs, states, reports


def masked_outputs(layer: Any, outputs: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """The outputs with zeros where Keras has them: those of all steps, or the last state alone.

    Before the first valid step the last state is no output.
    """
    shape = tf.shape(mask)[:2]
    valid = tf.reshape(tf.cast(mask, tf.bool), tf.concat([shape, [1]], 0))
    if layer.go_backwards and not (layer.unroll and layer.return_sequences):
        valid = tf.reverse(valid, [1])  # Keras does not do this when it unrolls
    if not layer.return_sequences:
        last, reached = valid[:, -1:], tf.reduce_any(valid, axis=1, keepdims=True)
        valid = last if layer.zero_output_for_mask else reached
    elif not layer.zero_output_for_mask:
        return outputs
    return tf.where(valid, outputs, tf.zeros_like(outputs))


def axes_swapped(values: tf.Tensor) -> tf.Tensor:
    """`[batch, time, width]` as `[time, batch, width]`, and back."""
    return tf.transpose(values, [1, 0, 2])


@contextlib.contextmanager
def swapped(owner: keras.layers.Layer, name: str, value: Any) -> Iterator[None]:
    """Sets the attribute `name` of an instance to `value` while the block runs."""
    missing = object()
    original = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
