"""SimpleRNN, LSTM, GRU: `h_t = gates(x_t·W + b + h_{t-1}·U)`, exact through the loop over time.

The input projection `x·W + b` of all steps is one product before the loop, which computes only what
is recurrent. The projection is watched: its cotangent is the pre-activation cotangent of every
step. Together with the states that each step read, it determines the gradients of W, U and b.
Keras' own loop handles masks, initial states, direction and return flags. A masked step has a
cotangent of 0, so what is recorded of it does not matter.

The time is that of the layer's own step and of the norms of two products. The memory is that of the
projection's cotangent and the states of all steps, `[batch, time, (gates + 1) · units]`.

The loop is Keras' own with another step, so Keras handles masks, states, direction and flags.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import Explicit, GradientTerm, Linear, Product
from dp_sparse.clipping.tap import Tap

# From a step's projected input and states to its new states (the output first) and to what the uses
# need to know of the step (h_{t-1} first), all [batch, units].
Step = Callable[[tf.Tensor, list[tf.Tensor]], tuple[list[tf.Tensor], list[tf.Tensor]]]
_LAYERS = keras.layers.RNN, keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU


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


@dataclasses.dataclass(frozen=True)
class ColumnBlocks:
    """`z_k = x_k·W_k` for each block of W's columns; each block has its own inputs.

    Inputs are `[batch, time, blocks · in]`, cotangents `[batch, time, Σ widths]`.

    Attributes:
        widths: How many columns each block has.
    """

    widths: tuple[int, ...]

    def blocks(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> Iterator[Product]:
        """One product per block of columns."""
        own_inputs = tf.split(inputs, len(self.widths), axis=-1)
        own_cotangents = tf.split(cotangents, self.widths, axis=-1)
        yield from map(Product, own_inputs, own_cotangents)

    def gradient(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """Σ_i g_i, float32 `[in, Σ widths]`."""
        over = [[0, 1], [0, 1]]  # examples and steps
        products = self.blocks(inputs, cotangents)
        return tf.concat([tf.tensordot(p.inputs, p.cotangents, over) for p in products], axis=1)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What the loop of a call computed, in the order of the inputs for either direction.

    Attributes:
        inputs: x after dropout, `[batch, time, in]`: one for all gates, or one per gate.
        states: h_{t-1} after dropout, `[batch, time, units]`: one for all gates, or one per gate.
        gates: What else each step reported (in a GRU the reset gate), `[batch, time, units]`.
    """

    inputs: list[tf.Tensor]
    states: list[tf.Tensor]
    gates: list[tf.Tensor]


# From a trace and the cotangents of its input projections to the inputs and cotangents of h·U.
Recurrent = Callable[[Any, Trace, tf.Tensor], tuple[list[tf.Tensor], tf.Tensor]]


def call_simple_rnn(
    layer: keras.layers.SimpleRNN, call: Callable[..., Any], tap: Tap, *args: Any, **kwargs: Any
) -> Any:
    """Runs a SimpleRNN call and records its kernels and bias."""
    with _recorded_loop(layer, tap, _simple_step, _as_projected):
        return call(*args, **kwargs)


def call_lstm(
    layer: keras.layers.LSTM, call: Callable[..., Any], tap: Tap, *args: Any, **kwargs: Any
) -> Any:
    """Runs an LSTM call and records its kernels and bias."""
    with _recorded_loop(layer, tap, _lstm_step, _as_projected):
        return call(*args, **kwargs)


def call_gru(
    layer: keras.layers.GRU, call: Callable[..., Any], tap: Tap, *args: Any, **kwargs: Any
) -> Any:
    """Runs a GRU call, its reset gate before or after the product, and records its variables."""
    with _recorded_loop(layer, tap, _gru_step, _gru_recurrent):
        return call(*args, **kwargs)


def _simple_step(cell: Any, kernel: tf.Tensor, masks: list[tf.Tensor]) -> Step:
    def step(
        projected: tf.Tensor, states: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        (h,) = states
        return [cell.activation(projected + _product(_dropped(h, masks), kernel))], [h]

    return step


def _lstm_step(cell: Any, kernel: tf.Tensor, masks: list[tf.Tensor]) -> Step:
    def step(
        projected: tf.Tensor, states: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        h, carry = states
        z = tf.split(projected + _product(_dropped(h, masks), kernel), 4, axis=-1)
        kept, written = cell.recurrent_activation(z[1]), cell.recurrent_activation(z[0])
        carry = kept * carry + written * cell.activation(z[2])
        return [cell.recurrent_activation(z[3]) * cell.activation(carry), carry], [h]

    return step


def _gru_step(cell: Any, kernel: tf.Tensor, masks: list[tf.Tensor]) -> Step:
    both, candidate = tf.split(kernel, [2 * cell.units, cell.units], axis=1)
    bias = _value(cell, cell.bias)[1] if cell.reset_after and cell.use_bias else 0.0

    def step(
        projected: tf.Tensor, states: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        (h,) = states
        x = tf.split(projected, 3, axis=-1)
        if cell.reset_after:
            inner = tf.split(
                _product(_dropped(h, masks), kernel) + tf.stop_gradient(bias), 3, axis=-1
            )
        else:
            inner = tf.split(_product(_dropped(h, masks[:2]), both), 2, axis=-1)
        update = cell.recurrent_activation(x[0] + inner[0])
        reset = cell.recurrent_activation(x[1] + inner[1])
        if cell.reset_after:
            new = cell.activation(x[2] + reset * inner[2])
        else:
            new = cell.activation(x[2] + _product(_dropped(reset * h, masks[2:]), candidate))
        return [update * h + (1 - update) * new], [h, reset]

    return step


def _as_projected(
    cell: Any, trace: Trace, cotangents: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The recurrent product is added to the projected inputs, so it has their cotangents."""
    return trace.states, cotangents


def _gru_recurrent(
    cell: Any, trace: Trace, cotangents: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The candidate's product is multiplied by the reset gate, or its input is."""
    (reset,) = trace.gates
    if not cell.reset_after:
        return [*trace.states[:2], reset * trace.states[-1]], cotangents
    both, candidate = tf.split(cotangents, [2 * cell.units, cell.units], axis=-1)
    return trace.states, tf.concat([both, reset * candidate], axis=-1)


@contextlib.contextmanager
def _recorded_loop(
    layer: Any,
    tap: Tap,
    step_of: Callable[[Any, tf.Tensor, list[tf.Tensor]], Step],
    recurrent: Recurrent,
) -> Iterator[None]:
    """Runs the layer's loop over time on projected inputs, and records it."""
    cell = layer.cell

    def inner_loop(
        sequences: tf.Tensor, initial_state: Any, mask: Any, training: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor, Any]:
        input_masks, state_masks = _dropout_masks(cell, training)
        inputs = _dropped(tf.cast(sequences, cell.compute_dtype), input_masks)
        projected = axes_swapped(_projected(cell, inputs))  # the batch leads what is recorded

        def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
            h, *gates = [tf.cast(values, tf.float32) for values in reports]
            trace = Trace(inputs, _dropped(h, state_masks), gates)
            return _terms(cell, tap, trace, cotangents[0], recurrent)

        tap.watch([projected], terms_of)
        step = step_of(cell, _value(cell, cell.recurrent_kernel), state_masks)
        mask = _single(mask)
        outputs, states, reports = looped(layer, step, projected, initial_state, mask)
        if mask is not None:
            outputs = masked_outputs(layer, outputs, mask)
        return outputs[:, -1], outputs, states

    with swapped(layer, "inner_loop", inner_loop):
        yield


def _terms(
    cell: Any, tap: Tap, trace: Trace, cotangents: tf.Tensor, recurrent: Recurrent
) -> list[tuple[keras.Variable, GradientTerm]]:
    terms: list[tuple[keras.Variable, GradientTerm]] = []
    recurrent_inputs, recurrent_cotangents = recurrent(cell, trace, cotangents)
    if tap.trains(cell.kernel):
        terms.append((cell.kernel, _product_term(cell, trace.inputs, cotangents)))
    if tap.trains(cell.recurrent_kernel):
        term = _product_term(cell, recurrent_inputs, recurrent_cotangents)
        terms.append((cell.recurrent_kernel, term))
    if tap.trains(cell.bias):
        gradients = tf.reduce_sum(cotangents, axis=1)
        if len(cell.bias.shape) == 2:  # one row for each of the two products
            own = tf.reduce_sum(recurrent_cotangents, axis=1)
            gradients = tf.stack([gradients, own], axis=1)
        terms.append((cell.bias, Explicit(gradients)))
    return terms


def _product_term(cell: Any, inputs: list[tf.Tensor], cotangents: tf.Tensor) -> GradientTerm:
    """The use of a kernel whose columns all have the same input, or each block its own.

    With several inputs each but the first is for one gate; the first is for the rest.
    """
    inputs = [tf.cast(x, tf.float32) for x in inputs]
    if len(inputs) == 1:
        return Product(inputs[0], cotangents)
    others = [cell.units] * (len(inputs) - 1)
    form = ColumnBlocks((cotangents.shape[-1] - sum(others), *others))
    return Linear((tf.concat(inputs, axis=-1),), (cotangents,), form)


def _dropout_masks(cell: Any, training: bool) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The masks `[batch, width]` of inputs and states: none, one, or one per gate.

    Keras draws them before the loop, for all of its steps; here they are only read.
    """
    if not training:
        return [], []
    masks = cell.get_dropout_mask(None), cell.get_recurrent_dropout_mask(None)
    own, of_states = ([] if m is None else list(m) if isinstance(m, list) else [m] for m in masks)
    return own, of_states


def _dropped(values: tf.Tensor, masks: list[tf.Tensor]) -> list[tf.Tensor]:
    """`[batch, (time,) width]` times each mask; the values themselves without any."""
    if values.shape.rank == 3:
        masks = [mask[:, tf.newaxis] for mask in masks]
    return [values * tf.cast(mask, values.dtype) for mask in masks] or [values]


def _projected(cell: Any, inputs: list[tf.Tensor]) -> tf.Tensor:
    """`x·W + b` of all steps, `[time, batch, gates · units]`, b without a GRU's recurrent row.

    Time comes first, as in Keras' loop, which then need not transpose this wide tensor.
    """
    projected = _product([axes_swapped(x) for x in inputs], _value(cell, cell.kernel))
    if cell.bias is None:
        return projected
    bias = _value(cell, cell.bias)
    return projected + (bias if bias.shape.rank == 1 else bias[0])


def _product(inputs: list[tf.Tensor], kernel: tf.Tensor) -> tf.Tensor:
    """`x·W` over the last axis, W's columns in as many equal blocks as there are inputs.

    No gradient flows to the kernel: its use is recorded, and the tape's would not be read.
    """
    blocks = tf.split(tf.stop_gradient(kernel), len(inputs), axis=1)
    multiply = tf.matmul if inputs[0].shape.rank == 2 else functools.partial(tf.tensordot, axes=1)
    products = [multiply(x, block) for x, block in zip(inputs, blocks, strict=True)]
    return products[0] if len(products) == 1 else tf.concat(products, axis=-1)


def _single(mask: Any) -> Any:
    """The mask of the inputs; with initial states Keras gives a list, the inputs' first."""
    return mask[0] if isinstance(mask, list | tuple) else mask


def _value(cell: Any, variable: keras.Variable) -> tf.Tensor:
    return tf.cast(variable.value, cell.compute_dtype)


_OF_CELLS: dict[type[keras.layers.Layer], Callable[..., Any]] = {
    keras.layers.SimpleRNNCell: call_simple_rnn,
    keras.layers.LSTMCell: call_lstm,
    keras.layers.GRUCell: call_gru,
}
RULES = tuple(_OF_CELLS.values())


def rule_for(layer: keras.layers.Layer) -> Callable[..., Any] | None:
    """The rule for the cell of a recurrent layer; None for other layers and cells."""
    if type(layer) not in _LAYERS or "call" in vars(layer.cell):
        return None
    return _OF_CELLS.get(type(layer.cell))
