"""Reads a traced graph: what a tensor is computed from, which functions an operation calls."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def is_constant(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from constants alone, or was made outside of graphs."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    return all(op.type == "Const" for op in roots(tensor, lambda op: op.op_def.is_stateful))


def roots(tensor: tf.Tensor, ends: Callable[[tf.Operation], bool]) -> list[tf.Operation]:
    """The operations that a tensor is computed from: those without inputs, or where it `ends`."""
    found, seen, waiting = [], set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        if op not in seen:
            seen.add(op)
            if ends(op) or not op.inputs:
                found.append(op)
            else:
                waiting += [given.op for given in op.inputs]
    return found


def captured_as(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The tensors that a function captured as this one: one or none."""
    captures = getattr(getattr(tensor, "graph", None), "captures", ())
    return [external for external, internal in captures if internal is tensor]


def called(op: tf.Operation) -> Iterator[Any]:
    """The functions that an operation calls; None for one that the graph does not have."""
    for attribute in op.op_def.attr:
        if attribute.type in ("func", "list(func)"):
            value = op.get_attr(attribute.name)
            for called in value if isinstance(value, list) else [value]:
                yield op.graph._get_function(called.name)


def arguments(op: tf.Operation, function: tf.Graph) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Each tensor that `op` gives to the function, with the argument that it is inside."""
    given = list(op.inputs)[1 if op.type in ("If", "StatelessIf", "Case") else 0 :]
    return zip(given, function.inputs, strict=False)
