"""Computations that XLA compiles as a whole: static shapes, and checks that are made after them.

XLA needs every shape when it compiles, and it drops assertions. Inside `compiled` a check is
therefore postponed: its condition leaves the kernel with the results, and no result is used before
all conditions were found true. Code that needs a static shape there asks `static_shapes`. The step
with an embedding layer, which a TPU compiles, is traced in the same way on any device.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

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
