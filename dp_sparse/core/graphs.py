"""Reads a traced graph: operations and functions, where tensors come from, which seeds are known.

Also replaces the call of a layer while it is traced.

"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

_KNOWN = "ReadVariableOp", "Shape", "ShapeN", "Size", "Rank", "Const"  # as seeds


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
        inputs = arguments(op, function)
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
        return all(map(self._is_known_root, roots(tensor, ends)))

    def _is_known_root(self, op: tf.Operation) -> bool:
        if op not in self.guarded or draws_entropy(op):
            return False
        if op.type != "Placeholder":
            return op.type in _KNOWN
        [argument] = op.outputs
        outside = captured_as(argument)
        if outside:
            return all(not tf.is_symbolic_tensor(t) or self.is_known(t) for t in outside)
        return argument.ref() not in self.secret


@dataclasses.dataclass(frozen=True)
class Reachable:
    """An operation of a traced graph, or of a function that the graph calls, however deep.

    Attributes:
        op: The operation.
        name: Its name, or that of the operation of the graph which calls the function it is in.
        handles: The handles that were asked for, as this operation's graph has them.
        seeds: Which seeds are known where this operation is.
    """

    op: tf.Operation
    name: str
    handles: dict[Any, str]
    seeds: KnownSeeds


def reachable(
    operations: Sequence[tf.Operation],
    handles: dict[Any, str] | None = None,
    seeds: KnownSeeds | None = None,
    caller: str = "",
    *,
    enters: Callable[[tf.Operation], bool] = lambda op: True,
) -> Iterator[Reachable]:
    """Every operation of these and of the functions that they call: the one reader of a graph.

    Args:
        operations: Of one graph.
        handles: References of variables' handles, with their paths.
        seeds: What is known of seeds outside.
        caller: The name to report instead of the operations' own.
        enters: Whether to read the functions that an operation calls.
    """
    handles, seeds = handles or {}, (seeds or KnownSeeds()).within(operations)
    for op in operations:
        name = caller or op.name
        yield Reachable(op, name, handles, seeds)
        for function in called(op) if enters(op) else ():
            if function is not None:
                inner, passed = handles, seeds
                if "Dataset" not in op.type:  # whose functions get elements, not what the op gets
                    inner = handles | _passed_on(op, function.graph, handles)
                    passed = seeds.passed_on(op, function.graph)
                made = function.graph.get_operations()
                yield from reachable(made, inner, passed, name, enters=enters)


def origin_of(tensor: tf.Tensor, handles: dict[Any, str]) -> str | None:
    """The path of the handle that a tensor is, also if a function captured it; else None."""
    while tensor.ref() not in handles:
        outside = captured_as(tensor)
        if not outside:
            return None
        [tensor] = outside
    return handles[tensor.ref()]


def _passed_on(op: tf.Operation, function: tf.Graph, handles: dict[Any, str]) -> dict[Any, str]:
    """The arguments of a function that are such handles, with their paths."""
    if not handles:
        return {}
    given = [pair for pair in arguments(op, function) if pair[0].dtype == tf.resource]
    origins = [(inside, origin_of(outside, handles)) for outside, inside in given]
    return {inside.ref(): path for inside, path in origins if path is not None}


@contextlib.contextmanager
def replaced_call(layer: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Within it `layer.call` is `call`; after it, what it was, also if an error ended it."""
    own = vars(layer).get("call")
    layer.call = call
    try:
        yield
    finally:
        del layer.call
        if own is not None:
            layer.call = own


def as_ids(values: Any, path: str) -> tf.Tensor:
    """Ids, numbers of any kind and shape, as int64.

    Raises:
        ValueError: They are text; `path` is the layer's.
    """
    ids = tf.convert_to_tensor(values)
    if ids.dtype == tf.string:
        raise ValueError(
            f"Expected ids at layer {path}, got text. Map text to ids with keras.layers.Hashing, "
            "or with StringLookup and a public or private vocabulary."
        )
    return tf.cast(ids, tf.int64)
