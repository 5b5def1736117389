"""One choice of rows for all replicas of a step, from the lookups of all of them."""

from typing import Any

import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import replicas
from dp_sparse.optimizers.base import PrivateOptimizer
from dp_sparse.selection import RowChoice, TableLookups, restricted


def choose_together(
    optimizer: PrivateOptimizer, lookups: list[TableLookups], draw: noise.Draw
) -> list[RowChoice]:
    """The rows that the lookups of all replicas choose, and where this one's stand among them."""
    if replicas.count() == 1 or not lookups:
        return optimizer.choose_rows(lookups, draw)
    widths = [tf.shape(table.row_ids)[1] for table in lookups]

    def choose(signed_ids: Any, *cotangents: Any) -> list[tf.Tensor]:
        of_tables = [tf.split(replicas.gathered(signed_ids), widths, axis=1, num=len(widths))]
        of_tables += [[replicas.gathered(each) for each in cotangents]] if cotangents else []
        everyone = [
            TableLookups(table.num_rows, tf.maximum(ids, -1 - ids), ids >= 0, *parts)
            for table, ids, *parts in zip(lookups, *of_tables, strict=True)
        ]
        return [choice.row_ids for choice in optimizer.choose_rows(everyone, draw)]

    # One tensor for all tables; what is not valid is below 0.
    signed = [tf.where(t.valid, t.row_ids, -1 - t.row_ids) for t in lookups]
    cotangents = [t.cotangents for t in lookups] if optimizer.reads_cotangents else []
    rows = replicas.merged(choose, tf.concat(signed, 1), *cotangents)
    return [
        RowChoice(own, restricted(table, own).places)
        for table, own in zip(lookups, rows, strict=True)
    ]
