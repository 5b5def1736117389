"""What the shapes of a model tell of its embedding tables: sizes, and lookups of an example."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.training.traced_pass import examples_of, signature_of, uses_of_pass


def inputs_of(model: keras.Model, batch: Any) -> Any:
    """The signature of a model's inputs; builds the model from the batch if it is not built.

    Raises:
        ValueError: The inputs are not known.
    """
    x = None if batch is None else examples_of(model, batch).x
    if x is not None and not model.built:
        model(x)
    specs = signature_of(model, x)
    if specs is None:
        raise ValueError(
            f"Expected a model whose inputs are known, or a batch of them, got {model.name} alone: "
            "call recommend(model, plan, batch)."
        )
    return specs


def lookups_of(model: keras.Model, specs: Any) -> dict[int, int]:
    """Lookups of an example in each table, by the table's id: from a traced pass.

    Tables that the pass does not look up are left out.

    Args:
        model: A model.
        specs: As `inputs_of`.

    Raises:
        ValueError: Their number is not known.
    """
    found: dict[int, int] = {}

    def trace(x: Any) -> None:
        for variable, use in uses_of_pass(model, x):
            if isinstance(use, clipping.Rows):
                if use.row_ids.shape[1] is None:
                    raise ValueError(
                        f"Expected lookups of {variable.path} of known number, got inputs of any "
                        "length: call recommend(model, plan, batch)."
                    )
                found[id(variable)] = use.row_ids.shape[1]

    tf.function(trace, autograph=False).get_concrete_function(specs)
    return found


def tables_by_name(
    tables: list[keras.Variable], lookups: dict[int, int], frequencies: Mapping[str, Any]
) -> dict[str, Any]:
    """As `plan.explain` takes them, by the names of layers; by paths where layers share a name.

    A table that is not in `lookups` has none.
    """
    names = [table.path.split("/")[-2] for table in tables]
    found = {
        name if names.count(name) == 1 else table.path: (
            int(table.shape[0]),
            lookups.get(id(table), 0),
        )
        for name, table in zip(names, tables, strict=True)
    }
    unknown = [name for name in frequencies if name not in found]
    if unknown:
        raise ValueError(
            f"Expected frequencies of the model's tables {sorted(found)}, got some of {unknown}."
        )
    for name, given in frequencies.items():
        if np.shape(given) != (found[name][0],):
            raise ValueError(
                f"Expected frequencies[{name!r}] of shape ({found[name][0]},), one of each row, "
                f"got shape {np.shape(given)}."
            )
    return {**found, **frequencies}
