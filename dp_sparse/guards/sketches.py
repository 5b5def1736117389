"""What is recorded of each example of a batch, short enough to be kept and compared.

A tensor is kept as two random projections and the norm of each example's part, so that comparing
two passes takes the memory of one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.clipping import (
    Rows,
    Seeds,
    Terms,
    exact,
    fields_of,
    filling_zeros,
    lets_nan_through,
    of_batch,
)
from dp_sparse.guards.rebatching import Rebatching
from dp_sparse.guards.restricted_arguments import restricted

_HALF_PRECISION = ("bfloat16", "float16")
_SMALL = 512  # entries of an example that are kept whole

# Takes a batch and the seeds of random layers; gives terms, losses and whether any were drawn.
RecordedPass = Callable[[Any, Seeds], tuple[Terms, tf.Tensor, bool]]


class Sketch(NamedTuple):
    """What is recorded of a batch, as far as it is compared.

    Attributes:
        projections: float32 `[batch, tensors, 2]`.
        norms: Of each example's part of each tensor, float32 `[batch, tensors]`.
        totals: The norm of an example's whole gradient where the tensor is a gradient, of whose
            terms rounding may be all that is left; 0 elsewhere. Float32 `[batch, tensors]`.
        ids: A hash of the ids that an example looks up, int64 `[batch]`.
    """

    projections: np.ndarray
    norms: np.ndarray
    totals: np.ndarray
    ids: np.ndarray


class _Named(NamedTuple):
    """A floating tensor.

    Attributes:
        name: The path of its variable, or the loss.
        tensor: `[batch, ...]`.
        is_gradient: Whether it is a gradient of the variable.
        is_lookups: Whether it holds cotangents of rows that were looked up.
    """

    name: str
    tensor: tf.Tensor
    is_gradient: bool = False
    is_lookups: bool = False

    @property
    def entries(self) -> int:
        """How many an example has; -1 if Python does not know."""
        known = self.tensor.shape[1:].is_fully_defined()
        return int(self.tensor.shape[1:].num_elements()) if known else -1

    @property
    def is_small(self) -> bool:
        """Whether it is kept whole until it is measured."""
        return 0 < self.entries <= _SMALL


class _Raw(NamedTuple):
    """What the graph gives of a pass.

    Attributes:
        small: Small tensors, one after another, float32 `[batch, entries]`.
        projections: Of the others, as in `Sketch`.
        norms: Likewise.
        squares: Squared norms of all gradients but those of lookups, float32 `[batch]`.
        integers: All of them, int64 `[batch, entries]`.
    """

    small: Any
    projections: Any
    norms: Any
    squares: Any
    integers: Any


class Sketcher:
    """A pass, made ready for batches of one signature at the cost of one trace.

    Attributes:
        names: What each tensor belongs to: a variable, the loss, and last the ids.
        random: Whether masks belong to places.
        half_precision: Whether some layer computes in bfloat16 or float16.
        alterable: Of each leaf of a batch, whether its numbers may have any value: it is not of ids
            or class labels, and the pass asserts nothing of it.
        takes_nan: Whether alterable floats may be NaN, too.
    """

    def __init__(
        self, model: keras.Model, recorded: RecordedPass, specs: Any, of_data: Any
    ) -> None:
        """Traces the pass.

        Args:
            model: What it runs.
            recorded: The pass.
            specs: The signature of its argument, nested `[batch, ...]`.
            of_data: Of each leaf whether it holds inputs or labels.
        """
        self._recorded = recorded
        self.names: list[str] = []
        self.random = False
        self.half_precision = any(
            layer.compute_dtype in _HALF_PRECISION for layer in model._flatten_layers()
        )
        self.takes_nan = not lets_nan_through(model)
        function = tf.function(_on_each_replica(model, self._trace), autograph=False)
        scalars = tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int64)
        self._traced = function.get_concrete_function(specs, *scalars)
        found = restricted(self._traced.graph)
        self.alterable = tf.nest.map_structure(
            lambda spec, data, argument: (
                data
                and (spec.dtype.is_floating or spec.dtype.is_integer)
                and argument.ref() not in found
            ),
            specs,
            of_data,
            tf.nest.pack_sequence_as(specs, self._arguments),
        )

    def sketch(self, batch: Any, fill: bool, seed: int, replica: int = 0) -> Sketch:
        """What the pass records of a batch.

        Args:
            batch: Nested arrays.
            fill: Whether weights that are 0 are replaced.
            seed: Of random layers, below 2³¹.
            replica: In whose context.
        """
        tensors = tf.nest.map_structure(tf.convert_to_tensor, batch)
        found = self._traced(tensors, tf.constant(fill), tf.constant(seed, tf.int64))
        return _sketch(self._floats, _Raw(*(part[replica].numpy() for part in found)))

    def _trace(self, batch: Any, fill: tf.Tensor, seed: tf.Tensor) -> _Raw:
        self._arguments = tf.nest.flatten(batch)

        def seeds(number: int, dtype: str) -> tf.Tensor:
            return tf.cast(tf.stack([tf.constant(number, tf.int64), seed]), dtype)

        with filling_zeros(fill):
            terms, losses, self.random = self._recorded(batch, seeds)
        self._floats, integers = _tensors(terms, losses)
        self.names = [*(each.name for each in self._floats), "the ids that it looks up"]
        with tf.control_dependencies([losses]):  # which follow the check of shapes
            return _raw(terms, losses, self._floats, integers)


def _on_each_replica(model: keras.Model, trace: Callable[..., _Raw]) -> Callable[..., Any]:
    """The pass in the context of each replica: what it gives, `[replicas, ...]`."""
    strategy = model._distribute_strategy
    if strategy is None:
        return lambda *args: [part[tf.newaxis] for part in trace(*args)]
    trace = tf.autograph.experimental.do_not_convert(trace)

    def of_each(*args: Any) -> list[tf.Tensor]:
        found = strategy.run(trace, args=args)
        return [tf.stack(strategy.experimental_local_results(part)) for part in found]

    return of_each


def worst(reference: Sketch, found: Sketch, rebatching: Rebatching) -> int | None:
    """The tensor, or after all tensors the ids, in which most of the examples differ, if any do.

    An example's part of a tensor is compared relative to its own size and to a hundredth of what a
    tenth of the parts that are not 0 exceed (of a gradient also of the example's whole gradient),
    below which float32 cannot tell what is left of terms that cancel.

    Args:
        reference: Of the batch itself.
        found: Of the other batch.
        rebatching: Which it is, and how many that are compared must differ.
    """
    places = rebatching.places
    totals = np.where(np.isfinite(reference.totals), reference.totals, 0)  # not of one left out
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = reference.norms + 0.01 * (_exceeded_by_a_tenth(reference.norms) + totals)
        was, now = reference.projections[places], found.projections
        close = np.abs(was - now) <= rebatching.tolerance * sizes[places][..., np.newaxis]
    both_lost = ~np.isfinite(was) & ~np.isfinite(now)  # of an example that the step zeroes
    other_ids = reference.ids[places] != found.ids
    differ = np.column_stack([~np.all(close | both_lost, 2), other_ids])
    differ &= rebatching.compared[:, np.newaxis]
    if np.count_nonzero(differ.any(1)) < rebatching.least:
        return None
    return int(np.argmax(np.count_nonzero(differ, 0)))


def _exceeded_by_a_tenth(norms: np.ndarray) -> np.ndarray:
    """The size of each tensor, float32 `[tensors]`, which one large example hardly moves."""
    ordered = -np.sort(-np.where(np.isfinite(norms), norms, 0), 0)
    there = np.count_nonzero(ordered > 0, 0)
    return ordered[there // 10, np.arange(norms.shape[1])]


def _tensors(terms: Terms, losses: tf.Tensor) -> tuple[list[_Named], list[tf.Tensor]]:
    """What clipping reads: floating tensors, and integers; each once, one of all as each one's."""
    floats, integers = [_Named("the loss", losses)], []
    seen: set[int] = set()
    for variable, term in terms:
        for tensor in fields_of(term):
            if id(tensor) in seen or 0 in tensor.shape[1:]:
                continue
            seen.add(id(tensor))
            if tensor.dtype.is_floating:
                is_lookups = isinstance(term, Rows)
                floats.append(_Named(variable.path, tensor, term.holds_gradients, is_lookups))
            else:
                integers.append(tf.cast(tensor, tf.int64))
        for own in of_batch(term):
            shape = [tf.shape(losses)[0], tf.size(own)]
            integers.append(tf.broadcast_to(tf.reshape(tf.cast(own, tf.int64), [-1]), shape))
    return floats, integers


def _raw(terms: Terms, losses: tf.Tensor, floats: list[_Named], integers: list[tf.Tensor]) -> _Raw:
    size = tf.shape(losses)[0]
    small = [tf.cast(each.tensor, tf.float32) for each in floats if each.is_small]
    large = [_measured(own.tensor, size, n) for n, own in enumerate(floats) if not own.is_small]
    squares = [term.squared_norms() for _, term in terms if not isinstance(term, Rows)]
    return _Raw(
        _joined(small, size),
        tf.stack([pair for pair, _ in large], 1) if large else tf.zeros([size, 0, 2]),
        tf.stack([norm for _, norm in large], 1) if large else tf.zeros([size, 0]),
        tf.add_n(squares) if squares else tf.zeros([size]),
        _joined(integers, size) if integers else tf.zeros([size, 0], tf.int64),
    )


def _joined(tensors: list[tf.Tensor], size: tf.Tensor) -> tf.Tensor:
    return tf.concat([_flat(tensor, size) for tensor in tensors], 1)


def _flat(tensor: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """`[batch, entries]`, by few operations where Python knows how many there are."""
    inner = tensor.shape[1:]
    known = inner.is_fully_defined() and inner.num_elements() > 0
    return tf.reshape(tensor, [-1, inner.num_elements()] if known else [size, -1])


def _measured(tensor: tf.Tensor, size: tf.Tensor, number: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Sketches values `[batch, ...]`: `[batch, 2]` along two random directions, norms `[batch]`.

    The directions of a number are the same for every batch.
    """
    part = _flat(tf.cast(tensor, tf.float32), size)
    directions = tf.random.stateless_normal([tf.shape(part)[1], 2], tf.constant([number, 0]))
    return tf.matmul(part, directions), tf.cast(tf.norm(exact(part), axis=1), tf.float32)


def _sketch(floats: list[_Named], raw: _Raw) -> Sketch:
    """The same of every tensor, in NumPy: a model of many tables would need many operations."""
    is_small = np.asarray([each.is_small for each in floats])
    starts = np.cumsum([0, *(each.entries for each in floats if each.is_small)])[:-1]
    shape = len(raw.small), len(floats)
    projections, norms = np.empty((*shape, 2), np.float32), np.empty(shape, np.float32)
    projections[:, ~is_small], norms[:, ~is_small] = raw.projections, raw.norms
    directions = np.random.default_rng(0).normal(size=(2, raw.small.shape[1])).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for axis, direction in enumerate(directions):
            projections[:, is_small, axis] = np.add.reduceat(raw.small * direction, starts, 1)
        squares = np.add.reduceat(np.square(raw.small, dtype=np.float64), starts, 1)
        norms[:, is_small] = np.sqrt(squares)
        # Cotangents stand for the gradient of lookups: as large, but for repeated ids.
        of_lookups = norms[:, [each.is_lookups for each in floats]]
        total = np.sqrt(raw.squares + np.square(of_lookups, dtype=np.float64).sum(1))
        totals = np.where([each.is_gradient for each in floats], total[:, np.newaxis], 0)
    factors = np.random.default_rng(1).integers(-(2**63), 2**63, raw.integers.shape[1])
    ids = np.sum((raw.integers + 1) * factors, 1)  # modulo 2⁶⁴
    return Sketch(projections, norms, totals.astype(np.float32), ids)
