"""An optimizer's state tree goes back with the steps that it spent, or not at all.

Keras assigns those values whose paths it finds and passes over the others, so a tree of an
optimizer with another name, or of one not built yet, would restore weights and forget the steps.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer


def guard(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Makes `set_state_tree` refuse what does not fit the optimizer."""
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
