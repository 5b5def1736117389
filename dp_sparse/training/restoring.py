"""Restores an optimizer's state completely, with the steps that it spent, or not at all.

Keras assigns the values whose paths it finds and ignores the others. So the state of an optimizer
that has another name, or is not built yet, would restore weights and lose the spent steps. An
optimizer that was compiled and has not trained is built first.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h5py
import keras

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.training.building import all_built, build_optimizer

_UNFIT = "the spent steps would be lost", "spent steps under another plan"


def guard(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Makes `set_state_tree` and `load_weights` refuse a state that does not fit the optimizer."""
    model.set_state_tree = _restoring_tree(model, optimizer)
    model.load_weights = _loading(model, optimizer)


def _restoring_tree(model: keras.Model, optimizer: PrivateOptimizer) -> Callable[..., None]:
    stock = model.set_state_tree

    @functools.wraps(stock)
    def set_state_tree(state_tree: Mapping[str, Any]) -> None:
        if "optimizer_variables" in state_tree:
            _build(model, optimizer)
            _check(set(_paths(state_tree["optimizer_variables"])), optimizer)
        stock(state_tree)

    return set_state_tree


def _loading(model: keras.Model, optimizer: PrivateOptimizer) -> Callable[..., None]:
    """Keras' own, which wraps what an optimizer refuses in sentences of its own.

    A file without the state of an optimizer, as of public weights, leaves the optimizer as it is.
    """
    stock = model.load_weights

    @functools.wraps(stock)
    def load_weights(filepath: Any, *args: Any, **kwargs: Any) -> None:
        _build(model, optimizer)
        if _has_weights_alone(str(filepath)):
            kwargs["objects_to_skip"] = [*kwargs.get("objects_to_skip", ()), optimizer]
        try:
            stock(filepath, *args, **kwargs)
        except ValueError as error:
            own = [part for part in str(error).split("\n\n") if any(u in part for u in _UNFIT)]
            if not own:
                raise
            raise PrivacyError(own[0]) from None

    return load_weights


def _has_weights_alone(path: str) -> bool:
    """Whether a local file of weights has no variables of an optimizer."""
    if not path.endswith(".weights.h5") or not os.path.exists(path):
        return False
    with h5py.File(path) as file:
        found: list[str] = []
        file.visit(found.append)
    return not any(name.startswith("optimizer/vars/") for name in found)


def _build(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Creates the optimizer's variables, if the model has its own."""
    if not optimizer.built and model.built and all_built(model):
        with model.distribute_strategy.scope():
            build_optimizer(model, optimizer)


def _check(given: set[str], optimizer: PrivateOptimizer) -> None:
    own = {variable.path for variable in optimizer.variables}
    wrong = sorted(given ^ own)
    if wrong:
        raise PrivacyError(
            f"Expected the state of all {len(own)} variables of {optimizer.name}, got another set, "
            f"which differs in {wrong[:3]}: the spent steps would be lost. Compile the model as "
            "the saved one was, with the same name= of the optimizer and of the one inside."
        )


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{path}/")
        else:
            yield path
