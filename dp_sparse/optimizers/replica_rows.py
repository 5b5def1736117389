"""The rows of a step, the same on all replicas, from the lookups of all of them."""

from typing import Any

import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import replicas
from dp_sparse.optimizers.base import PrivateOptimizer
from dp_sparse.selection import StepChoice, StepRows, TableLookups, restricted, with_public_rows


def rows_of_replicas(
    optimizer: PrivateOptimizer,
    lookups: list[TableLookups],
    public: list[tf.Tensor | None],
    draw: noise.Draw,
) -> StepChoice:
    """The rows of the step, of all replicas' lookups, and where those of this one stand in them.

    Args:
        optimizer: Chooses rows.
        lookups: Of this replica, in each table.
        public: Of each table rows that were drawn without the batch, the same on all replicas.
        draw: The step's random streams.
    """
    choice = _chosen(optimizer, lookups, draw)
    rows = [
        rows if ids is None else with_public_rows(rows, optimizer.public_rows(number, ids), table)
        for number, (rows, ids, table) in enumerate(zip(choice.rows, public, lookups, strict=True))
    ]
    return StepChoice(rows, choice.to_remember)


def _chosen(
    optimizer: PrivateOptimizer, lookups: list[TableLookups], draw: noise.Draw
) -> StepChoice:
    if replicas.count() == 1 or not lookups:
        return optimizer.rows_of_step(lookups, draw)
    widths = [tf.shape(table.row_ids)[1] for table in lookups]

    def of_all(signed_ids: Any, *cotangents: Any) -> tuple[list[tf.Tensor], Any]:
        of_tables = [tf.split(replicas.gathered(signed_ids), widths, axis=1, num=len(widths))]
        of_tables += [[replicas.gathered(each) for each in cotangents]] if cotangents else []
        everyone = [
            TableLookups(table.num_rows, tf.maximum(ids, -1 - ids), ids >= 0, *parts)
            for table, ids, *parts in zip(lookups, *of_tables, strict=True)
        ]
        choice = optimizer.rows_of_step(everyone, draw)
        return [each.row_ids for each in choice.rows], choice.to_remember

    # One tensor for all tables; what is not valid is below 0.
    signed = [tf.where(t.valid, t.row_ids, -1 - t.row_ids) for t in lookups]
    cotangents = [t.cotangents for t in lookups] if optimizer.reads_cotangents else []
    rows, to_remember = replicas.merged(of_all, tf.concat(signed, 1), *cotangents)
    pairs = zip(lookups, rows, strict=True)
    own = [StepRows(own, restricted(table, own).places) for table, own in pairs]
    return StepChoice(own, to_remember)
