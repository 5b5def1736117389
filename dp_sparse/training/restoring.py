"""Restores an optimizer's state tree completely, with the steps that it spent, or not at all.

Keras assigns the values whose paths it finds and ignores the others. So the tree of an optimizer
that has another name, or is not built yet, would restore weights and lose the spent steps.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer


def guard(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Makes `set_state_tree` refuse a state tree that does not fit the optimizer."""
    stock = model.set_state_tree

    @functools.wraps(stock)
    def set_state_tree(state_tree: Mapping[str, Any]) -> None:
        if "optimizer_variables" in state_tree:
            _check(set(_paths(state_tree["optimizer_variables"])), optimizer)
        stock(state_tree)

    model.set_state_tree = set_state_tree


def _check(given: set[str], optimizer: PrivateOptimizer) -> None:
    own = {variable.path for variable in optimizer.variables}
    wrong = sorted(given ^ own)
    if wrong:
        raise PrivacyError(
            f"Expected the state of all {len(own)} variables of {optimizer.name}, got another set, "
            f"which differs in {wrong[:3]}: the spent steps would be lost. Compile and build the "
            "model and its optimizer as the saved ones were (optimizer.build(...), the same name)."
        )


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{path}/")
        else:
            yield path
