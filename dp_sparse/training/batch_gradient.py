"""The clipped sums of one batch: a pass over it, the step's rows, clipping."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import Amounts, ClippedSums, Rows, Used
from dp_sparse.core import xla
from dp_sparse.optimizers import PrivateOptimizer, rows_of_replicas
from dp_sparse.sampling import Examples
from dp_sparse.selection import StepRows, TableLookups
from dp_sparse.training import forward_backward, metrics
from dp_sparse.training.forward_backward import Pass

StepRowsByTable = Mapping[int, StepRows]  # by the id of the table


def at_once(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[ClippedSums, dict[str, Any]]:
    """Sums over the examples, and Keras' logs over those that are real."""
    run, sums = _run(model, optimizer, examples, draw)
    return sums, metrics.update(model, examples, run.outputs, run.losses, run.output_losses)


def in_one_kernel(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[ClippedSums, dict[str, Any]]:
    """The same with all but the metrics in one kernel of XLA; the batch has its full capacity.

    What must be written before rows are read is written before the kernel, in a pass of which
    TensorFlow keeps no more than the ids.
    """
    if optimizer.delays_noise:
        forward_backward.record_forward(model, optimizer, examples.x, draw)

    def body() -> dict[str, Any]:
        run, sums = _run(model, optimizer, examples, draw)
        return {
            "sums": (sums.amounts, list(sums.row_ids)),
            "losses": (run.losses, run.output_losses),
            "outputs": run.outputs,
        }

    got = xla.compiled(body)
    sums = _without_filler(optimizer, *got["sums"])
    return sums, metrics.update(model, examples, got["outputs"], *got["losses"])


def _run(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[Pass, ClippedSums]:
    run = forward_backward.passed(model, optimizer, examples, draw)
    real = forward_backward.checked_examples(run, examples)
    step_rows = rows_of_step(optimizer, run.uses, real, draw)
    return run, clipped_sums(optimizer, run, step_rows, real)


def _without_filler(
    optimizer: PrivateOptimizer, amounts: Amounts, row_ids: list[tf.Tensor]
) -> ClippedSums:
    """The rows that there are, of those that XLA filled up to their capacity."""
    tables = optimizer.tables
    there = [own < table.shape[0] for own, table in zip(row_ids, tables, strict=True)]
    rows, row_ids = (
        [tf.boolean_mask(values, kept) for values, kept in zip(each, there, strict=True)]
        for each in (amounts.rows, row_ids)
    )
    return ClippedSums(optimizer.dense_variables, tables, row_ids, amounts._replace(rows=rows))


def rows_of_step(
    optimizer: PrivateOptimizer, uses: Used, real: tf.Tensor, draw: noise.Draw
) -> StepRowsByTable:
    """The step's rows, chosen over all tables at once, before any clipping."""
    use_of = {id(variable): use for variable, use in uses if isinstance(use, Rows)}
    with tf.control_dependencies([real]):  # which follows the check of shapes
        row_ids = {id(table): tf.identity(use_of[id(table)].row_ids) for table in optimizer.tables}
    lookups = [
        TableLookups(
            table.shape[0],
            row_ids[id(table)],
            use.valid & (real > 0)[:, tf.newaxis],
            use.cotangents,
        )
        for table, use in ((table, use_of[id(table)]) for table in optimizer.tables)
    ]
    of_tables = rows_of_replicas(optimizer, lookups, draw)
    return {id(t): rows for t, rows in zip(optimizer.tables, of_tables, strict=True)}


def clipped_sums(
    optimizer: PrivateOptimizer,
    run: Pass,
    step_rows: StepRowsByTable,
    real: tf.Tensor,
) -> ClippedSums:
    """Clips each example's gradient, restricted to the chosen rows, and sums.

    Variables that the records of this batch did not reach get zeros, and noise all the same.
    """
    clip_norm, style = optimizer.current_clip_norm, optimizer.clipping
    num_rows = {key: tf.size(rows.row_ids) for key, rows in step_rows.items()}
    with tf.control_dependencies([run.losses]):  # which follow the check of shapes
        restricted: Used = [
            (
                variable,
                use.restricted(step_rows[id(variable)].places) if isinstance(use, Rows) else use,
            )
            for variable, use in run.uses
        ]
        found = clipping.scaled(restricted, clip_norm, run.losses, real, style)
        reached, of_tables = found.dense_sums(), found.row_sums(num_rows)
    dense, tables = optimizer.dense_variables, optimizer.tables
    amounts = Amounts(
        [reached[id(v)] if id(v) in reached else tf.zeros(v.shape) for v in dense],
        [of_tables[id(table)] for table in tables],
        found.counts(real),
        style.statistic(found.squared_norms, clip_norm, real),
    )
    return ClippedSums(dense, tables, [step_rows[id(t)].row_ids for t in tables], amounts)
