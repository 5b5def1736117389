"""Which random numbers of a traced graph can be predicted, since their seeds are known."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dp_sparse.core import graphs

_KNOWN = "ReadVariableOp", "Shape", "ShapeN", "Size", "Rank", "Const"  # as seeds


def seeds_of(op: tf.Operation) -> tuple[int, ...] | None:
    """The seeds that an operation with a state of its own was traced with; None if it has none.

    TensorFlow takes entropy of the operating system if all of them are 0.
    """
    there = {attribute.name for attribute in op.op_def.attr}
    names = [name for name in ("seed", "seed2") if name in there]
    return tuple(int(op.get_attr(name)) for name in names) if names else None


def draws_entropy(op: tf.Operation) -> bool:
    """Whether nobody can predict what an operation draws."""
    seeds = seeds_of(op)
    return op.type == "NonDeterministicInts" or (seeds is not None and not any(seeds))


@dataclasses.dataclass(frozen=True)
class KnownSeeds:
    """Which seeds are known: those computed from constants, variables, shapes and counters alone.

    Attributes:
        guarded: Operations of this graph and of the graphs that call it. Secrets come from other
            operations.
        secret: References of the graph's arguments that are secret.
    """

    guarded: frozenset[tf.Operation] = frozenset()
    secret: frozenset[Any] = frozenset()

    def within(self, operations: Sequence[tf.Operation]) -> "KnownSeeds":
        """The same, with the operations of one more graph."""
        return dataclasses.replace(self, guarded=self.guarded | set(operations))

    def passed_on(self, op: tf.Operation, function: tf.Graph) -> "KnownSeeds":
        """The same, for the graph of a function that `op` calls."""
        inputs = graphs.arguments(op, function)
        secret = {inside.ref() for given, inside in inputs if not self.is_known(given)}
        return dataclasses.replace(self, secret=self.secret | secret)

    def is_known_of(self, op: tf.Operation) -> bool:
        """Whether `op` is a random operation with a known seed."""
        names = [argument.name for argument in op.op_def.input_arg]
        places = [names.index(name) for name in ("seed", "key") if name in names]
        if not op.type.startswith(("Stateless", "RandomIndexShuffle")) or not places:
            return False
        return all(self.is_known(op.inputs[place]) for place in places)

    def is_known(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is computed from constants, variables, shapes and counters alone."""
        ends = lambda op: (  # noqa: E731
            op.type in _KNOWN or op not in self.guarded or draws_entropy(op)
        )
        return all(map(self._is_known_root, graphs.roots(tensor, ends)))

    def _is_known_root(self, op: tf.Operation) -> bool:
        if op not in self.guarded or draws_entropy(op):
            return False
        if op.type != "Placeholder":
            return op.type in _KNOWN
        [argument] = op.outputs
        outside = graphs.captured_as(argument)
        if outside:
            return all(not tf.is_symbolic_tensor(t) or self.is_known(t) for t in outside)
        return argument.ref() not in self.secret
