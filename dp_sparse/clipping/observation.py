"""What is recorded of each example of a batch, short enough to be kept and compared.

A tensor is kept as two random projections and the norm of each example's part, so that comparing
two passes takes the memory of one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_sparse.clipping.machine_check import lets_nan_through
from dp_sparse.clipping.restricted_arguments import restricted
from dp_sparse.clipping.uses import Use, exact, fields_of, scalars_of
from dp_sparse.core import seldom

_HALF_PRECISION = ("bfloat16", "float16")
_OF_OTHER_VALUES = (
    "once other examples hold NaN",
    "once others are 10,000 times as large",
    "once others are 10,000 times as large with the other sign",
    "once others are 0",
    "once others are infinite",
    "once values are missing",
)

Used = Sequence[tuple[keras.Variable, Use]]


class Observation(NamedTuple):
    """What is recorded of a batch, as far as it is compared.

    Attributes:
        projections: float32 `[batch, tensors, 2]`.
        norms: Of each example's part of each tensor, float32 `[batch, tensors]`.
        totals: The norm of an example's whole gradient where the tensor is a gradient, of whose
            terms rounding may be all that is left; 0 elsewhere. Float32 `[batch, tensors]`.
        ids: A hash of the ids that an example looks up, int64 `[batch]`.
        random: Whether masks belong to places; bool scalar.
    """

    projections: tf.Tensor
    norms: tf.Tensor
    totals: tf.Tensor
    ids: tf.Tensor
    random: tf.Tensor


Observe = Callable[[Any], Observation]  # of a batch whose leaves are [batch, ...]
RecordedPass = Callable[[Any], tuple[Used, tf.Tensor, bool]]  # uses, losses, whether it drew seeds


class Observer:
    """A pass, made ready for other batches at the cost of one more trace each way.

    Attributes:
        observe: What the pass records of a batch of any size.
        observe_own_size: The same of one as large as the batch at hand, whose size Python knows;
            None if that was not asked for.
        names: What each number that `coupled` gives stands for: the tensors of `observe`, then
            those of `observe_own_size`, from `names_of_any_size` on; and all of them again for each
            kind of company in which floats are not what the data holds.
        tensors: How many names there are of each kind of company.
        half_precision: Whether some layer computes in bfloat16 or float16.
        alterable: Of each leaf of a batch, whether its numbers may have any value: it is not of ids
            or class labels, and the pass asserts nothing of it.
        takes_nan: Whether alterable floats may be NaN, too.
    """

    def __init__(
        self,
        model: keras.Model,
        recorded: RecordedPass,
        batch: Any,
        data: Any,
        own_size: bool = False,
    ) -> None:
        """Traces the pass.

        Args:
            model: What it runs.
            recorded: The pass.
            batch: Its argument, nested tensors `[batch, ...]`.
            data: Of each leaf whether it holds inputs or labels.
            own_size: Whether to trace it for the size of this batch, too.
        """
        self.names: list[str] = []
        self.alterable = tf.nest.map_structure(
            lambda leaf, of_data: of_data and (leaf.dtype.is_floating or leaf.dtype.is_integer),
            batch,
            data,
        )
        self.half_precision = any(
            layer.compute_dtype in _HALF_PRECISION for layer in model._flatten_layers()
        )
        self.takes_nan = not lets_nan_through(model)
        self._recorded = recorded
        self.observe = self._made_for(batch, lambda shape: [None, *shape[1:]])
        self.names_of_any_size = len(self.names)
        self.observe_own_size = self._made_for(batch, lambda shape: shape) if own_size else None
        tensors = self.names.copy()
        for company in _OF_OTHER_VALUES:
            self.names += [f"{name}, {company}" for name in tensors]
        self.tensors = len(tensors)

    def _made_for(self, batch: Any, shape_for: Callable[[Any], Any]) -> Observe:
        specs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(shape_for(leaf.shape), leaf.dtype), batch
        )
        # Written out at each of its calls it would be optimised, and so round, in another way.
        apart = {"_noinline": True}
        function = tf.function(self._trace, autograph=False, experimental_attributes=apart)
        traced = function.get_concrete_function(specs)
        self._leave_restricted(traced.graph)

        def observe(batch: Any) -> Observation:
            return traced(
                tf.nest.map_structure(
                    lambda leaf, spec: tf.ensure_shape(leaf, spec.shape), batch, specs
                )
            )

        return observe

    def _leave_restricted(self, graph: Any) -> None:
        """Marks the leaves that a trace restricts as not alterable."""
        found = restricted(graph)
        given = tf.nest.pack_sequence_as(self.alterable, self._arguments)
        self.alterable = tf.nest.map_structure(
            lambda may, argument: may and argument.ref() not in found, self.alterable, given
        )

    def _trace(self, batch: Any) -> Observation:
        self._arguments = tf.nest.flatten(batch)
        uses, losses, random = self._recorded(batch)
        self.names += names(uses, losses)
        with tf.control_dependencies([losses]):  # which follow the check of shapes
            return observation(uses, losses, random)


def observation(uses: Used, losses: tf.Tensor, random: bool) -> Observation:
    """What is compared of a pass.

    Args:
        uses: Each variable with its use, as clipping reads it.
        losses: float32 `[batch]`.
        random: Whether the pass drew seeds.
    """
    floats, integers = _tensors(uses, losses)
    size = tf.shape(losses)[0]
    parts = [tf.reshape(tf.cast(each.tensor, tf.float32), [size, -1]) for each in floats]
    measured = [_measured(part, number) for number, part in enumerate(parts)]
    pairs, norms = [pair for pair, _ in measured], [norm for _, norm in measured]
    total = tf.sqrt(tf.add_n([use.squared_norms() for _, use in uses]))
    totals = [total if each.is_gradient else tf.zeros_like(total) for each in floats]
    hashes = [_hash(tf.reshape(ids, [size, -1]), number) for number, ids in enumerate(integers)]
    ids = tf.add_n(hashes) if hashes else tf.zeros([size], tf.int64)
    sizes = tf.stack(norms, 1), tf.stack(totals, 1)
    return Observation(tf.stack(pairs, 1), *sizes, ids, tf.constant(random))


def names(uses: Used, losses: tf.Tensor) -> list[str]:
    """What each number that `coupled` gives stands for: a tensor's variable, the loss, the ids."""
    return [*(each.name for each in _tensors(uses, losses)[0]), "the ids that it looks up"]


def count_tensors(uses: Used, losses: tf.Tensor) -> int:
    """How many an observation has."""
    return len(_tensors(uses, losses)[0])


def not_zero(uses: Used, losses: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Which tensors of an observation have an entry that is not 0; bool `[tensors]`.

    All false unless `wanted`.
    """
    floats = _tensors(uses, losses)[0]

    def found() -> tf.Tensor:
        return tf.stack([tf.reduce_any(tf.not_equal(each.tensor, 0)) for each in floats])

    return tf.cond(wanted, seldom(found), lambda: tf.zeros([len(floats)], tf.bool))


class _Named(NamedTuple):
    """A floating tensor, the variable it belongs to, and whether it is a gradient of it."""

    name: str
    tensor: tf.Tensor
    is_gradient: bool


def _tensors(uses: Used, losses: tf.Tensor) -> tuple[list[_Named], list[tf.Tensor]]:
    """What clipping reads: floating tensors, and integers; each once, one of all as each one's."""
    floats, integers = [_Named("the loss", losses, False)], []
    seen: set[int] = set()
    for variable, use in uses:
        for tensor in fields_of(use):
            if id(tensor) in seen or 0 in tensor.shape[1:]:
                continue
            seen.add(id(tensor))
            if tensor.dtype.is_floating:
                floats.append(_Named(variable.path, tensor, use.holds_gradients))
            else:
                integers.append(tf.cast(tensor, tf.int64))
        for scalar in scalars_of(use):
            integers.append(tf.fill([tf.shape(losses)[0], 1], tf.cast(scalar, tf.int64)))
    return floats, integers


_INTEGER = tf.TensorSpec([], tf.int32)


# Both are traced once in a process, whatever is recorded.
@tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None], tf.float32), _INTEGER])
def _measured(part: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Of `[batch, entries]`: `[batch, 2]` along two random directions, and norms `[batch]`.

    The directions of a number are the same for every batch.
    """
    directions = tf.random.stateless_normal([tf.shape(part)[1], 2], tf.stack([number, 0]))
    return tf.matmul(part, directions), tf.cast(tf.norm(exact(part), axis=1), tf.float32)


@tf.function(autograph=False, input_signature=[tf.TensorSpec([None, None], tf.int64), _INTEGER])
def _hash(part: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """int64 `[batch]`: the same for the same entries, and hardly ever for others."""
    seed = tf.stack([number, 1])
    factors = tf.random.stateless_uniform([tf.shape(part)[1]], seed, None, None, tf.int64)
    return tf.reduce_sum((part + 1) * factors, 1)
