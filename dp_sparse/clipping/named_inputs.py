"""Functional models take their inputs by name.

Keras pairs a dict with a functional model's inputs by their sorted places: one column more, as
`dict(frame)` gives, and each input behind it gets the column of another. Here a model gets the
columns that it names, and no others. A subclassed model takes the dict as it is.

The module also rejects ids that were floats before, where a float cannot hold all of them.

bfloat16 holds every integer up to 2⁸, float16 up to 2¹¹, float32 up to 2²⁴; above that an id
becomes that of another row, in silence. Read from the traced graph, at no cost to a step.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.clipping.graph_guard import handles_of
from dp_sparse.core import UnsupportedLayerError, graphs

_TOLD: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()
_REPLACED = ("_standardize_inputs", "compute_output_spec")  # by which a call pairs its inputs
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


def named_inputs(model: keras.Model, x: Any) -> Any:
    """x without the columns that a functional model has no input for; a warning names them once.

    Args:
        model: Any model; of one that is not functional, x is returned as it is.
        x: Its inputs, dicts of them by name, or anything else that Keras takes.

    Raises:
        ValueError: A column that an input needs is missing.
    """
    struct = _structure(model)
    if struct is None:
        return x
    left_out: list[str] = []
    taken = _taken(model, struct, x, "x", left_out)
    _tell(model, left_out)
    if isinstance(x, Mapping) and (names := _names_of(struct)) is not None:
        return dict(zip(names, _inside(taken), strict=True))  # as copies of the model know them
    return taken


def typed_inputs(model: keras.Model, x: Any) -> list[tuple[str, tf.Tensor, tf.DType]]:
    """Each input of a functional model: its place, what it is given, and the dtype that it takes.

    Args:
        model: Any model; one that is not functional has none.
        x: What `named_inputs` returned.
    """
    struct = _structure(model)
    found: list[tuple[str, tf.Tensor, tf.DType]] = []
    if struct is not None:
        _pair(struct, x, "x", found)
    return found


def _pair(struct: Any, given: Any, place: str, found: list[tuple[str, tf.Tensor, Any]]) -> None:
    names = _names_of(struct) if isinstance(given, Mapping) else None
    if names is not None:
        for name, inner in zip(names, _inside(struct), strict=True):
            _pair(inner, given[name], f"{place}[{name!r}]", found)
    elif isinstance(given, list | tuple) and len(given) == len(_inside(struct)):
        for index, (inner, each) in enumerate(zip(_inside(struct), given, strict=True)):
            _pair(inner, each, f"{place}[{index}]", found)
    elif isinstance(struct, keras.KerasTensor) and hasattr(given, "dtype"):
        found.append((place, given, tf.as_dtype(struct.dtype)))


@contextlib.contextmanager
def taken_by_name(model: keras.Model) -> Iterator[None]:
    """Within it the model, and functional models inside, take their inputs by name."""
    replaced = take_by_name(model)
    try:
        yield
    finally:
        for inner in replaced:
            _restore(inner)


def take_by_name(model: keras.Model) -> list[keras.Model]:
    """Makes the model, and functional models inside, take their inputs by name from now on.

    Returns those that did not yet.
    """
    found = [inner for inner in _functional_models(model) if not _is_replaced(inner)]
    for inner in found:
        for name in _REPLACED:
            setattr(inner, name, _by_name(inner, getattr(inner, name), tells=inner is model))
    return found


def take_by_place(model: keras.Model) -> None:
    """Undoes `take_by_name`."""
    for inner in filter(_is_replaced, _functional_models(model)):
        _restore(inner)


def _by_name(model: keras.Model, stock: Any, tells: bool) -> Any:
    of = weakref.ref(model)

    @functools.wraps(stock)
    def paired(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        own = of()
        left_out: list[str] = []
        inputs = _taken(own, _structure(own), inputs, "x", left_out)
        if tells:
            _tell(own, left_out)
        return stock(inputs, *args, **kwargs)

    return paired


def _functional_models(model: keras.Model) -> list[keras.Model]:
    """Those in a model; a Sequential has one input, which Keras finds by its name."""
    return [each for each in model._flatten_layers() if _is_functional(each)]


def _is_replaced(model: keras.Model) -> bool:
    return _REPLACED[0] in vars(model)


def _restore(model: keras.Model) -> None:
    for name in _REPLACED:
        delattr(model, name)


def _is_functional(layer: Any) -> bool:
    return type(layer).call.__module__ == "keras.src.models.functional"


def _structure(model: Any) -> Any:
    """The inputs of a functional model as it was made of them; None if its call is its own."""
    functional = getattr(model, "_functional", None) or model  # what a Sequential is inside
    return functional._inputs_struct if _is_functional(functional) else None


def _taken(model: Any, struct: Any, given: Any, place: str, left_out: list[str]) -> Any:
    """What a structure of inputs takes of `given`, in its form; others are added to `left_out`."""
    if isinstance(given, Mapping) and (names := _names_of(struct)) is not None:
        missing = [name for name in names if name not in given]
        if missing:
            raise ValueError(
                f"Expected {place} with the inputs {names} of model {model.name}, got {[*given]}, "
                f"without {missing}: give each column the name of its input."
            )
        left_out += [f"{place}[{name!r}]" for name in given if name not in names]
        return _like(
            struct,
            [
                _taken(model, inner, given[name], f"{place}[{name!r}]", left_out)
                for name, inner in zip(names, _inside(struct), strict=True)
            ],
        )
    sequences = isinstance(struct, list | tuple) and isinstance(given, list | tuple)
    if sequences and len(struct) == len(given):
        pairs = enumerate(zip(struct, given, strict=True))
        inside = [_taken(model, own, each, f"{place}[{i}]", left_out) for i, (own, each) in pairs]
        return _like(struct, inside)
    return given


def _inside(struct: Any) -> list[Any]:
    if isinstance(struct, dict):
        return [*struct.values()]
    return [*struct] if isinstance(struct, list | tuple) else [struct]


def _like(struct: Any, inside: list[Any]) -> Any:
    if isinstance(struct, dict):
        return dict(zip(struct, inside, strict=True))
    return inside if isinstance(struct, list | tuple) else inside[0]


def _names_of(struct: Any) -> list[str] | None:
    """The names by which a dict gives these inputs; None if some have none."""
    if isinstance(struct, dict):
        return [*struct]
    named = all(isinstance(each, keras.KerasTensor) for each in _inside(struct))
    return [each.name for each in _inside(struct)] if named else None


def _tell(model: keras.Model, left_out: list[str]) -> None:
    told = _TOLD.setdefault(model, set())
    if set(left_out) - told:
        told.update(left_out)
        warnings.warn(
            f"Model {model.name} has no input for {', '.join(left_out)}: left out.", stacklevel=2
        )


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
    return graphs.origin_of(table, handles)


def _moved(tensor: tf.Tensor, seen: dict[Any, bool]) -> bool:
    """Whether a tensor's values are those of an input; notes it of all that it is made of."""
    key = tensor.ref()
    if key not in seen:
        seen[key] = tensor.op.type in _INPUTS
        if tensor.op.type in _MOVES:
            seen[key] = any([_moved(given, seen) for given in tensor.op.inputs])
    return seen[key]
