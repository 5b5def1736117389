"""Computations that XLA compiles as a whole: static shapes, and checks that are made after them.

XLA needs every shape when it compiles, and it drops assertions. Inside `compiled` a check is
therefore postponed: its condition leaves the kernel with the results, and no result is used before
all conditions were found true. Code that needs a static shape there asks `static_shapes`. The step
with an embedding layer, which a TPU compiles, is traced in the same way on any device.

It also finds distinct values and places in a sorted list, under XLA with static shapes.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_MOST_STEPS = 31  # of a search in any list
_DROPPED = ("Assert", "CheckNumerics", "CheckNumericsV2")  # operations

Check = Callable[[tf.Tensor, tuple[tf.Tensor, ...]], tf.Operation]


@dataclasses.dataclass(frozen=True)
class Postponed:
    """The condition and values of a check, computed now; `check` makes the check of them later."""

    condition: tf.Tensor
    values: tuple[tf.Tensor, ...]
    check: Check


_POSTPONED: contextvars.ContextVar[list[Postponed] | None] = contextvars.ContextVar(
    "postponed", default=None
)


def static_shapes() -> bool:
    """Whether code is traced for XLA, which needs static shapes: in `compiled` or `postponing`."""
    return _POSTPONED.get() is not None


def postpone(condition: tf.Tensor, values: tuple[tf.Tensor, ...], check: Check) -> tf.Operation:
    """Calls `check` with the condition and the values once the kernel has computed them."""
    postponed = _POSTPONED.get()
    assert postponed is not None
    postponed.append(Postponed(condition, values, check))
    return tf.no_op()


def compiled(body: Callable[[], Any]) -> Any:
    """What `body` returns, computed by one kernel of XLA.

    Args:
        body: Called once, while the outer graph is traced. It may read and write variables and use
            tensors of that graph. It returns nested tensors, all of static shape.

    Raises:
        ValueError: The body has an assertion that is not the package's.
        Whatever a postponed check says, at run time, before any result is used.
    """
    postponed: list[Postponed] = []

    @tf.function(jit_compile=True, autograph=False)
    def kernel() -> Any:
        with postponing() as found:
            result = body()
        postponed[:] = found
        return result, [(check.condition, check.values) for check in found]

    _refuse_dropped(kernel.get_concrete_function().graph)
    result, outcomes = kernel()
    checks = [
        made.check(condition, values)
        for made, (condition, values) in zip(postponed, outcomes, strict=True)
    ]
    with tf.control_dependencies(checks):
        return tf.nest.map_structure(tf.identity, result)


def _refuse_dropped(graph: tf.Graph) -> None:
    """Raises ValueError if the graph has checks that are not the package's: XLA drops them."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    dropped = sorted(node.name for node in nodes if node.op in _DROPPED)
    if dropped:
        raise ValueError(
            f"Expected a model without assertions of its own under jit_compile=True, which drops "
            f"them, got {dropped[0]}. Remove it, or compile with jit_compile=False."
        )


@contextlib.contextmanager
def postponing() -> Iterator[list[Postponed]]:
    """Traces what runs inside as for XLA, and gives the checks that it postpones."""
    found: list[Postponed] = []
    token = _POSTPONED.set(found)
    try:
        yield found
    finally:
        _POSTPONED.reset(token)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The distinct values of a list.

    Attributes:
        values: `[groups]`, each once, in no particular order. Under XLA they are sorted, and
            filled up to the length of the list.
        places: int32 `[elements]`: the place in `values` of each element's value.
    """

    values: tf.Tensor
    places: tf.Tensor


def grouped(elements: tf.Tensor, filler: int) -> Groups:
    """The groups of integers; O(elements), under XLA one sort.

    Args:
        elements: `[elements]`.
        filler: What `values` is filled up with under XLA.
    """
    if not static_shapes():
        return Groups(*tf.unique(elements))
    order = tf.argsort(elements)
    ordered = tf.gather(elements, order)
    begins = tf.concat([tf.ones_like(ordered[:1], tf.bool), ordered[1:] != ordered[:-1]], 0)
    group = (tf.cumsum(tf.cast(begins, tf.int32)) - 1)[:, tf.newaxis]
    places = tf.scatter_nd(order[:, tf.newaxis], group[:, 0], tf.shape(elements))
    filled = tf.fill(tf.shape(elements), tf.cast(filler, elements.dtype))
    return Groups(tf.tensor_scatter_nd_update(filled, group, ordered), places)


def lower_bound(ordered: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """How many of `ordered`, which increases, are below each of `values`; int32 of their shape.

    O(values · log ordered). XLA's own search would compare every pair.
    """
    if not static_shapes():
        return tf.searchsorted(ordered, values)
    size = ordered.shape[0]
    if size == 0:
        return tf.zeros_like(values, tf.int32)
    steps = _MOST_STEPS if size is None else max(1, math.ceil(math.log2(size + 1)))
    size = tf.size(ordered) if size is None else size  # which XLA knows when it compiles

    def halved(step: tf.Tensor, below: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        further = below + tf.bitwise.left_shift(1, steps - 1 - step)
        fits = (further <= size) & (tf.gather(ordered, tf.minimum(further, size) - 1) < values)
        return step + 1, tf.where(fits, further, below)

    # A loop, since XLA would compute unrolled steps again for each of their many uses.
    start = tf.constant(0), tf.zeros_like(values, tf.int32)
    return tf.while_loop(lambda step, _: step < steps, halved, start)[1]


def places_of(values: tf.Tensor, ordered: tf.Tensor) -> tf.Tensor:
    """Where in `ordered`, int64 and increasing, each of `values` stands first, int32; else -1.

    O(values · log ordered).
    """
    place = lower_bound(ordered, values)
    padded = tf.concat([ordered, tf.constant([-1], tf.int64)], 0)
    return tf.where(tf.equal(tf.gather(padded, place), values), place, -1)
