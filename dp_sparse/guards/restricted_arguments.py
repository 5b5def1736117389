"""Which arguments of a traced pass cannot hold any value: ids, class labels, values it asserts.

An operation that fails on some values must not get them from the checks of isolation, which replace
numbers of a batch by extreme ones: integers may be ids, a model without `Input(dtype=...)` may look
up ids that come as floats, and a loss may take class labels. The graph says so before anything is
computed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dp_sparse.core import graphs

_FAIL = {
    "Assert",
    "CheckNumerics",
    "CheckNumericsV2",
    "Cholesky",
    "MatrixInverse",
    "MatrixSolve",
    "Range",
    "SelfAdjointEigV2",
    "Svd",
}
# Operations that no integer in these inputs makes fail. Of others any integer may be an index, a
# size or a divisor.
_ALL, _FIRST = slice(None), slice(1)
_TAKE_ANY_INTEGER = {
    **dict.fromkeys(("Identity", "IdentityN", "StopGradient", "PreventGradient", "Cast"), _ALL),
    **dict.fromkeys(("Add", "AddV2", "AddN", "Sub", "Mul", "Neg", "Abs", "Sign", "Square"), _ALL),
    **dict.fromkeys(("Maximum", "Minimum", "ClipByValue", "Select", "SelectV2"), _ALL),
    **dict.fromkeys(("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"), _ALL),
    **dict.fromkeys(("Pack", "Unpack", "Squeeze", "AsString", "StringToHashBucketFast"), _ALL),
    **dict.fromkeys(("Reshape", "ExpandDims", "Transpose", "StridedSlice", "Slice"), _FIRST),
    **dict.fromkeys(("BroadcastTo", "Tile", "SplitV", "GatherV2", "OneHot"), _FIRST),
    **dict.fromkeys(("Sum", "Mean", "Prod", "Max", "Min", "ArgMax", "ArgMin"), _FIRST),
    "ConcatV2": slice(-1),
    "Split": slice(1, 2),
}
_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}  # no value goes through


def restricted(graph: Any) -> set[Any]:
    """The arguments of a traced function, as references, from which such an operation computes.

    Operations in functions that the graph calls count, too, and so do later turns of a loop.
    """
    callers: dict[int, list[tf.Operation]] = {}
    failing, integers = [], []
    for op in list(_operations(graph, callers)):
        failing += _restricted_by(op)
        integers += _integers_restricted_by(op)
    found = _computed_from(integers, callers, _is_integer_or_bool)
    failing += [source for made in found for source in _floats_cast_to(made.deref())]
    found |= _computed_from(failing, callers, lambda tensor: True)
    return found & {argument.ref() for argument in graph.inputs}


def _is_integer_or_bool(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_integer or tensor.dtype.is_bool)


def _computed_from(
    waiting: list[tf.Tensor],
    callers: dict[int, list[tf.Operation]],
    through: Callable[[tf.Tensor], bool],
) -> set[Any]:
    """These tensors, and all from which they are computed by tensors that it goes through."""
    seen: set[Any] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() not in seen and through(tensor):
            seen.add(tensor.ref())
            waiting += _sources(tensor, callers)
    return seen


def _operations(graph: Any, callers: dict[int, list[tf.Operation]]) -> Iterator[tf.Operation]:
    """All, also of functions that are called; `callers` gets what calls each, by its graph."""
    waiting, calls = [graph], {}
    while waiting:
        for op in waiting.pop().get_operations():
            yield op
            kind = op.type
            if kind not in calls:
                kinds = {attribute.type for attribute in op.op_def.attr}
                calls[kind] = bool(kinds & {"func", "list(func)"})
            for function in graphs.called(op) if calls[kind] else ():
                if function is None:
                    continue
                if id(function.graph) not in callers:
                    waiting.append(function.graph)
                callers.setdefault(id(function.graph), []).append(op)


def _restricted_by(op: tf.Operation) -> list[tf.Tensor]:
    """The inputs of an operation that must not have any value."""
    if op.type in _FAIL:
        return list(op.inputs)[:1] if op.type == "Assert" else list(op.inputs)
    return []


def _floats_cast_to(made: tf.Tensor) -> list[tf.Tensor]:
    """The floats that an integer was cast from."""
    if made.op.type != "Cast" or not made.dtype.is_integer:
        return []
    return [source for source in made.op.inputs if source.dtype.is_floating]


def _integers_restricted_by(op: tf.Operation) -> list[tf.Tensor]:
    """The inputs of an operation that must not be any integer, and what ends a loop.

    What a function is called with is judged inside of the function.
    """
    functions = list(graphs.called(op))
    if functions and None not in functions:
        return [own for function in functions for own in function.graph.outputs if _ends(op, own)]
    harmless = list(op.inputs)[_TAKE_ANY_INTEGER[op.type]] if op.type in _TAKE_ANY_INTEGER else []
    kept = {id(own) for own in harmless}
    return [own for own in op.inputs if own.dtype.is_integer and id(own) not in kept]


def _ends(op: tf.Operation, output: tf.Tensor) -> bool:
    return _is_loop(op) and output.dtype == tf.bool and output.shape.rank == 0


def _sources(tensor: tf.Tensor, callers: dict[int, list[tf.Operation]]) -> list[tf.Tensor]:
    """What a tensor is computed from, in one operation back."""
    op, place = tensor.op, tensor.value_index
    if op.type == "Placeholder":
        return [
            source for caller in callers.get(id(op.graph), []) for source in _given(caller, tensor)
        ]
    if op.type in _OF_SHAPES:
        return []
    functions = [function for function in graphs.called(op) if function is not None]
    if not functions:
        return list(op.inputs)
    ends = [own.graph.outputs[place] for own in functions if place < len(own.graph.outputs)]
    before = [op.inputs[place]] if _is_loop(op) else []  # of a loop that does not run
    return ends + before


def _given(caller: tf.Operation, argument: tf.Tensor) -> list[tf.Tensor]:
    """What an operation gives to a function as this argument, also after a turn of a loop."""
    function = argument.graph
    places = [i for i, own in enumerate(function.inputs) if own is argument]
    pairs = list(graphs.arguments(caller, function))
    outside = [pairs[place][0] for place in places if place < len(pairs)]
    if not _is_loop(caller):
        return outside
    bodies = [own.graph for own in graphs.called(caller) if own is not None]
    turned = [own.outputs[i] for own in bodies for i in places if i < len(own.outputs)]
    return outside + turned


def _is_loop(op: tf.Operation) -> bool:
    return op.type in ("While", "StatelessWhile")
