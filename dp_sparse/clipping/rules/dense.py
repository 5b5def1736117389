"""Dense: `z = x·W + b`, with LoRA `z = x·(W + s·A·B) + b`.

EinsumDense: `z = einsum(equation, x, W) + b`, for every equation whose batch letter leads.

A letter is a position (in x and z), an input (in x and W), an output (in W and z) or a group (in
all three). W is one block for each group, and each block a product summed over positions.
"""

import dataclasses
import string
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import Explicit, GradientTerm, Linear, Product
from dp_sparse.clipping.rules.activation import of_broadcast, watched_preactivation
from dp_sparse.clipping.rules.fallback import call_any_layer
from dp_sparse.clipping.tap import Tap


def call_dense(
    layer: keras.layers.Dense, call: Callable[..., Any], tap: Tap, inputs: tf.Tensor, **kwargs: Any
) -> tf.Tensor:
    """Runs a Dense call and records its product and its bias.

    Positions are all axes but the first and last.
    """

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        terms: list[tuple[keras.Variable, GradientTerm]] = []
        x, dz = _by_position(tf.cast(inputs, tf.float32)), _by_position(cotangents[0])
        if tap.trains(layer._kernel):
            terms.append((layer._kernel, Product(x, dz)))
        if tap.trains(layer.bias):
            terms.append((layer.bias, Explicit(_over_positions(dz))))
        return terms + (_lora_terms(layer, tap, x, dz) if layer.lora_enabled else [])

    def watch(preactivation: tf.Tensor) -> tf.Tensor:
        tap.watch([preactivation], terms_of)
        return preactivation

    with watched_preactivation(layer, watch):
        return call(inputs, **kwargs)


def _lora_terms(
    layer: keras.layers.Dense, tap: Tap, x: tf.Tensor, dz: tf.Tensor
) -> list[tuple[keras.Variable, GradientTerm]]:
    scale = layer.lora_alpha / layer.lora_rank
    a, b = (tf.cast(v.value, tf.float32) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    terms: list[tuple[keras.Variable, GradientTerm]] = []
    if tap.trains(layer.lora_kernel_a):
        terms.append((layer.lora_kernel_a, Product(x, tf.einsum("...n,rn->...r", scale * dz, b))))
    if tap.trains(layer.lora_kernel_b):
        terms.append((layer.lora_kernel_b, Product(tf.einsum("...d,dr->...r", scale * x, a), dz)))
    return terms


def _by_position(values: tf.Tensor) -> tf.Tensor:
    """`[batch, ..., width]` as `[batch, positions, width]`; `[batch, width]` stays as it is."""
    if values.shape.rank == 2:
        return values
    inner = values.shape[1:-1]
    positions = inner.num_elements() if inner.is_fully_defined() else -1
    return tf.reshape(values, [tf.shape(values)[0], positions, values.shape[-1]])


def _over_positions(values: tf.Tensor) -> tf.Tensor:
    return values if values.shape.rank == 2 else tf.reduce_sum(values, axis=1)


@dataclasses.dataclass(frozen=True)
class Einsum:
    """The bilinear form `inputs,weight->outputs`, letters only; the batch's is the first of both.

    Attributes:
        inputs: Letters of x.
        weight: Letters of W.
        outputs: Letters of z.
    """

    inputs: str
    weight: str
    outputs: str

    def blocks(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> Iterator[Product]:
        """One product for each index of the letters that all three have."""
        groups = [c for c in self.weight if c in self.inputs and c in self.outputs]
        positions = [c for c in self.inputs[1:] if c in self.outputs and c not in self.weight]
        ins = [c for c in self.weight if c in self.inputs and c not in groups]
        outs = [c for c in self.weight if c in self.outputs and c not in groups]
        x = _arranged(inputs, self.inputs, [groups, positions, ins])
        dz = _arranged(cotangents, self.outputs, [groups, positions, outs])
        for index in range(x.shape[1]):
            yield Product(x[:, index], dz[:, index])

    def gradient(self, inputs: tf.Tensor, cotangents: tf.Tensor) -> tf.Tensor:
        """Σ_i g_i, of the shape of W."""
        return tf.einsum(f"{self.inputs},{self.outputs}->{self.weight}", inputs, cotangents)

    def is_covered(self) -> bool:
        """Whether the batch leads and every letter has one of the four roles."""
        once = all(len(set(part)) == len(part) for part in (self.inputs, self.weight, self.outputs))
        batch = self.inputs[0]
        leads = self.outputs[0] == batch and batch not in self.weight
        given = set(self.inputs) | set(self.outputs)
        known = set(self.weight) <= given and set(self.outputs) <= given | set(self.weight)
        return once and leads and known and set(self.outputs) <= set(self.inputs) | set(self.weight)


def call_einsum_dense(
    layer: keras.layers.EinsumDense,
    call: Callable[..., Any],
    tap: Tap,
    inputs: tf.Tensor,
    **kwargs: Any,
) -> tf.Tensor:
    """Runs an EinsumDense call and records its product and its bias."""
    form = einsum_of(layer.equation, inputs.shape.rank)
    lora = layer.lora_enabled
    if form is None or not form.is_covered() or (lora and not _ends_with_output(form)):
        return call_any_layer(layer, call, tap, inputs, **kwargs)

    def terms_of(cotangents: list[tf.Tensor]) -> list[tuple[keras.Variable, GradientTerm]]:
        x, dz = tf.cast(inputs, tf.float32), cotangents[0]
        terms: list[tuple[keras.Variable, GradientTerm]] = []
        if tap.trains(layer._kernel):
            terms.append((layer._kernel, Linear((x,), (dz,), form)))
        if tap.trains(layer.bias):
            terms.append((layer.bias, Explicit(of_broadcast(dz, layer.bias.shape))))
        return terms + (_einsum_lora_terms(layer, tap, form, x, dz) if lora else [])

    def watch(preactivation: tf.Tensor) -> tf.Tensor:
        tap.watch([preactivation], terms_of)
        return preactivation

    with watched_preactivation(layer, watch):
        return call(inputs, **kwargs)


def einsum_of(equation: str, rank: int) -> Einsum | None:
    """The equation with letters for its ellipsis, for inputs of `rank` axes."""
    operands, outputs = equation.replace(" ", "").split("->")
    inputs, weight = operands.split(",")
    missing = rank - len(inputs.replace("...", ""))
    if "..." in weight or missing < 0:
        return None
    free = [c for c in string.ascii_letters if c not in equation]
    letters = "".join(free[:missing])
    return Einsum(inputs.replace("...", letters), weight, outputs.replace("...", letters))


def _ends_with_output(form: Einsum) -> bool:
    last = form.weight[-1]
    return last in form.outputs and last not in form.inputs


def _einsum_lora_terms(
    layer: keras.layers.EinsumDense, tap: Tap, form: Einsum, x: tf.Tensor, dz: tf.Tensor
) -> list[tuple[keras.Variable, GradientTerm]]:
    """W + s·A·B, where B maps the rank to the last letter of W."""
    scale, last = layer.lora_alpha / layer.lora_rank, form.weight[-1]
    rank = next(
        c for c in string.ascii_letters if c not in form.inputs + form.weight + form.outputs
    )
    narrow = form.outputs.replace(last, rank)
    first = Einsum(form.inputs, form.weight[:-1] + rank, narrow)
    second = Einsum(narrow, rank + last, form.outputs)
    a, b = (tf.cast(v.value, tf.float32) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    terms: list[tuple[keras.Variable, GradientTerm]] = []
    if tap.trains(layer.lora_kernel_a):
        back = tf.einsum(f"{form.outputs},{rank}{last}->{narrow}", scale * dz, b)
        terms.append((layer.lora_kernel_a, Linear((x,), (back,), first)))
    if tap.trains(layer.lora_kernel_b):
        down = tf.einsum(f"{first.inputs},{first.weight}->{narrow}", scale * x, a)
        terms.append((layer.lora_kernel_b, Linear((down,), (dz,), second)))
    return terms


def _arranged(values: tf.Tensor, letters: str, kinds: list[list[str]]) -> tf.Tensor:
    """`[batch, groups, positions, width]`; letters of no kind are summed."""
    order = letters[0] + "".join(c for kind in kinds for c in kind)
    if order != letters:
        values = tf.einsum(f"{letters}->{order}", values)
    static, dynamic = values.shape, tf.shape(values)
    sizes, axis = [dynamic[0]], 1
    for kind in kinds:
        inner = static[axis : axis + len(kind)]
        known = inner.is_fully_defined()
        sizes.append(
            inner.num_elements() if known else tf.reduce_prod(dynamic[axis : axis + len(kind)])
        )
        axis += len(kind)
    return tf.ensure_shape(tf.reshape(values, sizes), [None, *map(_static, sizes[1:])])


def _static(size: Any) -> int | None:
    return size if isinstance(size, int) else None
