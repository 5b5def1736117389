"""The rows of a `SelectedRows` as an optimizer holds them: matched to its model and to its plan."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.errors import PrivacyError
from dp_sparse.plan import PrivacyPlan
from dp_sparse.selection.row_set import SelectedRows


def checked_rows(rows: Any, plan: PrivacyPlan) -> SelectedRows:
    """`rows`, if the plan pays for them.

    Raises:
        ValueError: `rows` is no `SelectedRows`.
        PrivacyError: They were selected privately, and their own release is none of the plan's.
    """
    if not isinstance(rows, SelectedRows):
        raise ValueError(
            "Expected rows from dp_sparse.select_top_k or dp_sparse.SelectedRows, got "
            f"rows={rows!r}."
        )
    if rows.costs and rows.release not in plan.releases:
        raise PrivacyError(
            f"The plan does not pay for these rows ({rows.release.name}): make it with "
            "PrivacyPlan(..., releases=(rows.release,)).calibrate()."
        )
    return rows


def rows_of_tables(rows: SelectedRows, tables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """The selected rows of each table of the model, int64 `[k]`, as constants outside of any graph.

    A table goes by the name of its layer.

    Raises:
        ValueError: The selection has other tables, or tables of other sizes, than the model.
    """
    sizes = {_name(table): table.shape[0] for table in tables}
    if len(sizes) != len(tables) or sizes != dict(rows.num_rows):
        raise ValueError(
            f"Expected rows for the model's embedding tables {sizes}, got rows for "
            f"{dict(rows.num_rows)}: select them with tables=, by the names of the Embedding "
            "layers."
        )
    with tf.init_scope():
        return [tf.constant(rows.row_ids[_name(table)], tf.int64) for table in tables]


def _name(table: keras.Variable) -> str:
    return table.path.split("/")[-2]
