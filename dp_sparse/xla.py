"""Computations that XLA compiles as a whole: static shapes, and checks that are made after them.

XLA needs every shape when it compiles, and drops assertions. Inside `compiled` a check is
therefore postponed: its condition leaves the kernel with the results, and no result can be used
before all conditions were found true. What must have a shape of its own there asks `inside`.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

Check = Callable[[tf.Tensor, tuple[tf.Tensor, ...]], tf.Operation | None]


@dataclasses.dataclass(frozen=True)
class _Postponed:
    condition: tf.Tensor
    values: tuple[tf.Tensor, ...]
    check: Check


_POSTPONED: contextvars.ContextVar[list[_Postponed] | None] = contextvars.ContextVar(
    "postponed", default=None
)


def inside() -> bool:
    """Whether the code that runs is being traced for XLA."""
    return _POSTPONED.get() is not None


def postpone(condition: tf.Tensor, values: tuple[tf.Tensor, ...], check: Check) -> tf.Operation:
    """Has `check` called with the condition and the values once the kernel has computed them."""
    postponed = _POSTPONED.get()
    assert postponed is not None
    postponed.append(_Postponed(condition, values, check))
    return tf.no_op()


def compiled(body: Callable[[], Any]) -> Any:
    """What `body` returns, computed by one kernel of XLA.

    Args:
        body: Called once, while the graph around is traced; it may read and write variables and
            use tensors of that graph. It returns nested tensors, all of static shape.

    Raises:
        Whatever a check made inside says, at run time, before any result can be used.
    """
    postponed: list[_Postponed] = []

    @tf.function(jit_compile=True, autograph=False)
    def kernel() -> Any:
        with _postponing() as found:
            result = body()
        postponed[:] = found
        return result, [(check.condition, check.values) for check in found]

    result, outcomes = kernel()
    checks = [
        made.check(condition, values)
        for made, (condition, values) in zip(postponed, outcomes, strict=True)
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.nest.map_structure(tf.identity, result)


@contextlib.contextmanager
def _postponing() -> Iterator[list[_Postponed]]:
    found: list[_Postponed] = []
    token = _POSTPONED.set(found)
    try:
        yield found
    finally:
        _POSTPONED.reset(token)
