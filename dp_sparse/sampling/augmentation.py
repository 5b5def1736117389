"""Random changes of each example, under a seed of its own that nobody can predict.

`batches(..., augment=f)` calls `f(x, y, seed)` for one example at a time, inside of the input
pipeline, in all ways of training. A seed is two numbers for `tf.random.stateless_uniform`,
`tf.image.stateless_random_flip_left_right` and the like. Seeds come from a key that each reading of
the batches draws anew and nobody saves. O(capacity) calls a batch, on as many threads as help.

### Formal Guarantees
`f` sees one example, and what it draws has the same distribution whatever other examples are in the
batch, so neighbours stay neighbours, as long as it was given no private rows beforehand: tensors
with as many rows as there are examples are refused, others are not recognised. Its graph is read
(`input_guard`): random numbers from other known seeds, state and Python code are refused. Seeds are
64 bits each of a stream by a key of 128 bits. Padding is changed as well, and counts no more than
before.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, graphs
from dp_sparse.sampling import held_out, input_guard

_FEW = 32  # rows that may well be something else
Augment = Callable[[Any, Any, tf.Tensor], tuple[Any, Any]]


def augmented(
    batches: tf.data.Dataset,
    augment: Augment | None,
    fresh: Callable[[int], bytes] = os.urandom,
) -> tf.data.Dataset:
    """The same batches with each example's x and y changed by `augment`.

    Args:
        batches: Of a sampler, `(x, y, weights)`, their leaves `[capacity, ...]`.
        augment: Given x and y of one example and its seed, int32 `[2]`, returns x and y, of one
            shape for all examples. None for no change.
        fresh: Gives as many bytes as it is asked for, for the key of a reading.

    Raises:
        ValueError: It is no function of three arguments, returns no pair, or shapes that it leaves
            open.
        PrivacyError: It draws random numbers by other seeds, keeps something, runs Python code, or
            holds a row for each example.
    """
    if augment is None:
        return batches
    traced = _traced(augment, batches.element_spec)
    _refuse_other_rows(traced.graph, held_out.numbers_of_examples(batches))
    capacity = tf.nest.flatten(batches.element_spec)[0].shape[0]
    signature = tf.nest.map_structure(
        lambda spec: tf.TensorSpec(spec.shape, spec.dtype), traced.structured_outputs
    )

    def changed(batch: Any, seeds: tf.Tensor) -> Any:
        x, y, weights = batch
        of_one = lambda example: traced(*example)  # noqa: E731
        x, y = tf.map_fn(of_one, (x, y, seeds), fn_output_signature=signature)
        return x, y, weights

    zipped = tf.data.Dataset.zip(batches, _seeds(capacity, fresh))
    run = zipped.map(changed, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return input_guard.own(run.prefetch(2))


def _traced(augment: Augment, spec: Any) -> Any:
    """The function of one example, checked."""
    _require_three_arguments(augment)
    x, y = tf.nest.map_structure(lambda s: tf.TensorSpec(s.shape[1:], s.dtype), spec[:2])
    seed = tf.TensorSpec([2], tf.int32, name="seed")

    def of_one(x: Any, y: Any, seed: tf.Tensor) -> tuple[Any, Any]:
        found = augment(x, y, seed)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"Expected (x, y) from augment(x, y, seed), got {type(found).__name__}: return "
                "both, also where one of them does not change."
            )
        return tf.nest.map_structure(tf.convert_to_tensor, found)

    traced = tf.function(of_one).get_concrete_function(x, y, seed)
    input_guard.check_function(traced.graph, "augment", secret=traced.inputs[-1:])
    for leaf in tf.nest.flatten(traced.structured_outputs):
        if not leaf.shape.is_fully_defined():
            raise ValueError(
                f"Expected augment to return one fixed shape for all examples, got {leaf.shape}: "
                "set it with tf.ensure_shape(...)."
            )
    return traced


def _refuse_other_rows(graph: Any, numbers: set[int]) -> None:
    """Raises PrivacyError if a function holds as many rows as there are examples, as MixUp may."""
    operations = [each.op for each in graphs.reachable(graph.get_operations())]
    inside = {id(op.graph): op.graph for op in operations} | {id(graph): graph}
    held = [outside for each in inside.values() for outside, _ in each.captures]
    held += [op.outputs[0] for op in operations if op.type == "Const"]
    for tensor in held:
        rows = tensor.shape[0] if tensor.shape.rank else None
        if rows is not None and rows > _FEW and rows in numbers:
            raise PrivacyError(
                f"Expected augment to change an example by itself, got one that holds {rows} rows, "
                "as many as there are examples: mixing in rows of others (MixUp, CutMix) lets one "
                "example into the gradients of many.\nUse public rows, another number of them."
            )


def _require_three_arguments(augment: Any) -> None:
    try:
        inspect.signature(augment).bind("x", "y", "seed")
    except (TypeError, ValueError):
        raise ValueError(
            f"Expected augment=f, a function f(x, y, seed) of one example, got augment={augment!r}."
        ) from None


def _seeds(capacity: int, fresh: Callable[[int], bytes]) -> tf.data.Dataset:
    """int32 `[capacity, 2]` without end; each iterator has a key of its own."""

    def draw() -> Iterator[np.ndarray]:
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(fresh(16), "little")))
        while True:
            yield rng.integers(-(2**31), 2**31, (capacity, 2), np.int32)

    signature = tf.TensorSpec([capacity, 2], tf.int32)
    drawn = tf.data.Dataset.from_generator(draw, output_signature=signature)
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    return drawn.apply(endless)  # so that `fit` knows how many batches there are
