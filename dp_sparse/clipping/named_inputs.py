"""Functional models take their inputs by name.

Keras pairs a dict with a functional model's inputs by their sorted places: one column more, as
`dict(frame)` gives, and each input behind it gets the column of another. Here a model gets the
columns that it names, and no others. A subclassed model takes the dict as it is.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

_TOLD: weakref.WeakKeyDictionary[keras.Model, set[str]] = weakref.WeakKeyDictionary()
_REPLACED = ("_standardize_inputs", "compute_output_spec")  # by which a call pairs its inputs


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
