"""Ids that were floats: which of them a float cannot hold, and which are no numbers.

bfloat16 holds every integer up to 2⁸, float16 up to 2¹¹, float32 up to 2²⁴; above that an id
becomes that of another row, in silence. Read from the traced graph, at no cost to a step.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.graph_reading import handles_of, origin_of
from dp_sparse.core import UnsupportedLayerError

_EXACT = {tf.bfloat16: 2**8, tf.float16: 2**11, tf.float32: 2**24, tf.float64: 2**53}
_LOOKUPS = ("ResourceGather", "GatherV2")
_INPUTS = ("Placeholder", "Range")
# Operations whose results are their inputs' values, moved or shifted: of ids, still ids.
_MOVES = {
    *("Cast", "Identity", "IdentityN", "Snapshot", "StopGradient", "PreventGradient"),
    *("EnsureShape", "Reshape", "Squeeze", "ExpandDims", "Transpose", "ReverseV2", "Roll"),
    *("Slice", "StridedSlice", "Split", "SplitV", "Unpack", "GatherV2", "GatherNd"),
    *("ConcatV2", "Pack", "Tile", "BroadcastTo", "Pad", "PadV2", "Select", "SelectV2"),
    *("AddV2", "Sub", "Maximum", "Minimum", "ClipByValue", "Floor", "Round", "Rint", "FloorMod"),
}


def floats_of(ids: tf.Tensor) -> list[tf.Tensor]:
    """The floats that ids are, in a graph; none if they were integers from the input on."""
    if not tf.is_symbolic_tensor(ids):
        return []
    seen: dict[Any, bool] = {}
    _moved(ids, seen)
    tensors = [(key.deref(), moved) for key, moved in seen.items()]
    return [tensor for tensor, moved in tensors if moved and tensor.dtype in _EXACT]


def rounded_to_ids(ids: tf.Tensor) -> list[tf.Tensor]:
    """Those of `floats_of` that a cast turned into integers."""
    floats = {tensor.ref() for tensor in floats_of(ids)}
    casts = [op for key in floats for op in key.deref().consumers() if op.type == "Cast"]
    found = {op.inputs[0].ref() for op in casts if op.outputs[0].dtype.is_integer}
    return [key.deref() for key in found]


def refuse_rounded_ids(model: keras.Model, operations: Sequence[tf.Operation]) -> None:
    """Raises UnsupportedLayerError for lookups in weights whose rows such floats cannot name.

    Args:
        model: The model whose weights count, trained or not.
        operations: What a call of it added to a graph.
    """
    weights = {variable.path: variable for variable in model.variables}
    handles = handles_of(model.variables)
    lines = []
    for path, ids in _lookups(operations, handles):
        found = [tensor.dtype for tensor in floats_of(ids)]
        exact = min((_EXACT[dtype] for dtype in found), default=0)
        if found and exact < weights[path].shape[0]:
            dtype = next(dtype for dtype in found if _EXACT[dtype] == exact)
            lines.append(
                f"- {path}: its ids pass through {dtype.name}, which holds integers up to "
                f"{exact:,} only, and it has {weights[path].shape[0]:,} rows: wrong rows would be "
                "looked up. Give the Input of ids dtype='int32', keras.Input(..., dtype='int32')."
            )
    if lines:
        raise UnsupportedLayerError("Cannot train privately:\n" + "\n".join(dict.fromkeys(lines)))


def _lookups(
    operations: Sequence[tf.Operation], handles: dict[Any, str]
) -> Iterator[tuple[str, tf.Tensor]]:
    """The path of each weight that is looked up by its first axis, and the ids."""
    for op in operations:
        if op.type in _LOOKUPS:
            path = _weight_of(op.inputs[0], handles)
            along = tf.get_static_value(op.inputs[2]) if op.type == "GatherV2" else 0
            if path is not None and along == 0:
                yield path, op.inputs[1]


def _weight_of(table: tf.Tensor, handles: dict[Any, str]) -> str | None:
    """The path of the weight that a tensor is, or is a copy of in another dtype."""
    while table.dtype != tf.resource:
        if table.op.type not in ("ReadVariableOp", "Identity", "Cast"):
            return None
        table = table.op.inputs[0]
    return origin_of(table, handles)


def _moved(tensor: tf.Tensor, seen: dict[Any, bool]) -> bool:
    """Whether a tensor's values are those of an input; notes it of all that it is made of."""
    key = tensor.ref()
    if key not in seen:
        seen[key] = tensor.op.type in _INPUTS
        if tensor.op.type in _MOVES:
            seen[key] = any([_moved(given, seen) for given in tensor.op.inputs])
    return seen[key]
