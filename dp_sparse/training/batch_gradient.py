"""The clipped sums of one batch: a pass over it, the choice of rows, clipping."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import Rows, exact
from dp_sparse.core import replicas, xla
from dp_sparse.optimizers import PrivateOptimizer, PrivateSums, choose_together
from dp_sparse.selection import RowChoice, TableLookups
from dp_sparse.training import forward_backward, metrics
from dp_sparse.training.forward_backward import Pass, Used

Choices = dict[int, RowChoice]  # by the id of the table


@dataclasses.dataclass(frozen=True)
class BatchSums:
    """What a batch, or a part of one, adds up to.

    Attributes:
        sums: Clipped sums of every trainable variable.
        counts: int64 `[3]`: real examples, how many of them were clipped, how many zeroed because
            they were not finite. Not private.
        statistic: What the clipping style releases beside the sums, before its noise; float64.
        not_zero: Of the pass, as `clipping.not_zero`, as long as isolation checks ask for it.
    """

    sums: PrivateSums
    counts: tf.Tensor
    statistic: tf.Tensor
    not_zero: tf.Tensor


def at_once(
    model: keras.Model, optimizer: PrivateOptimizer, batch: Any, draw: noise.Draw
) -> tuple[BatchSums, dict[str, Any]]:
    """Sums over the batch `(x, y, weights)`, and Keras' logs over its real examples."""
    run, sums = _run(model, optimizer, batch, draw)
    return sums, metrics.update(model, batch, run.outputs, run.losses, run.output_losses)


def in_one_kernel(
    model: keras.Model, optimizer: PrivateOptimizer, batch: Any, draw: noise.Draw
) -> tuple[BatchSums, dict[str, Any]]:
    """The same with all but the metrics in one kernel of XLA; the batch has its full capacity.

    What must be written before rows are read is written before the kernel, in a pass of which
    TensorFlow keeps no more than the ids.
    """
    if optimizer.delays_noise:
        with tf.GradientTape(watch_accessed_variables=False) as unused:
            forward_backward.record(
                model, optimizer, batch[0], unused, draw, optimizer.before_lookup(draw)
            )
    variables: tuple[list[keras.Variable], ...] = ([], [])

    def body() -> dict[str, Any]:
        run, found = _run(model, optimizer, batch, draw)
        dense, tables = found.sums.dense, found.sums.tables
        variables[0][:], variables[1][:] = [v for v, _ in dense], [t for t, _ in tables]
        return {
            "dense": [total for _, total in dense],
            "rows": [(rows.values, rows.indices) for _, rows in tables],
            "counts": (found.counts, found.statistic, found.not_zero),
            "losses": (run.losses, run.output_losses),
            "outputs": run.outputs,
        }

    got = xla.compiled(body)
    tables = [
        (table, _without_filler(table, *rows))
        for table, rows in zip(variables[1], got["rows"], strict=True)
    ]
    sums = PrivateSums(list(zip(variables[0], got["dense"], strict=True)), tables)
    logs = metrics.update(model, batch, got["outputs"], *got["losses"])
    return BatchSums(sums, *got["counts"]), logs


def _run(
    model: keras.Model, optimizer: PrivateOptimizer, batch: Any, draw: noise.Draw
) -> tuple[Pass, BatchSums]:
    run = forward_backward.run(model, optimizer, batch, draw)
    real = forward_backward.checked_examples(run, batch)
    choices = choose_rows(optimizer, run.uses, real, draw)
    return run, clipped_sums(model, optimizer, run, choices, real)


def _without_filler(
    table: keras.Variable, values: tf.Tensor, row_ids: tf.Tensor
) -> tf.IndexedSlices:
    """The rows that there are, of a choice that XLA filled up to its capacity."""
    there = row_ids < table.shape[0]
    shape = tf.constant(list(table.shape), tf.int64)
    return tf.IndexedSlices(tf.boolean_mask(values, there), tf.boolean_mask(row_ids, there), shape)


def choose_rows(
    optimizer: PrivateOptimizer, uses: Used, real: tf.Tensor, draw: noise.Draw
) -> Choices:
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
    chosen = choose_together(optimizer, lookups, draw)
    return {id(t): choice for t, choice in zip(optimizer.tables, chosen, strict=True)}


def tensors(found: BatchSums) -> list[tf.Tensor]:
    """All sums."""
    values = [rows.values for _, rows in found.sums.tables]
    return [found.counts, *(total for _, total in found.sums.dense), *values]


def after(checks: list[tf.Operation], found: BatchSums) -> BatchSums:
    """The same sums, of which none can be used before all checks have passed."""
    tables = found.sums.tables
    with tf.control_dependencies(checks):
        dense = [(variable, tf.identity(total)) for variable, total in found.sums.dense]
        values = [tf.identity(rows.values) for _, rows in tables]
        counts, statistic = tf.identity(found.counts), tf.identity(found.statistic)
    slices = [
        (table, tf.IndexedSlices(own, rows.indices, rows.dense_shape))
        for own, (table, rows) in zip(values, tables, strict=True)
    ]
    return BatchSums(PrivateSums(dense, slices), counts, statistic, found.not_zero)


def over_replicas(found: BatchSums) -> BatchSums:
    """The sums of all replicas' shares of a batch, the same on each of them; in float64."""
    if replicas.count() == 1:
        return found
    dense, tables = found.sums.dense, found.sums.tables
    own = {
        "dense": [values for _, values in dense],
        "rows": [rows.values for _, rows in tables],
        "rest": [found.counts, found.statistic],
    }
    total = replicas.merged(replicas.summed, tf.nest.map_structure(exact, own))
    slices = [
        tf.IndexedSlices(values, rows.indices, rows.dense_shape)
        for values, (_, rows) in zip(total["rows"], tables, strict=True)
    ]
    sums = PrivateSums(
        [(v, values) for (v, _), values in zip(dense, total["dense"], strict=True)],
        [(table, rows) for (table, _), rows in zip(tables, slices, strict=True)],
    )
    counts, statistic = total["rest"]
    return BatchSums(sums, tf.cast(counts, tf.int64), statistic, found.not_zero)


def clipped_sums(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    run: Pass,
    choices: Choices,
    real: tf.Tensor,
) -> BatchSums:
    """Clips each example's gradient, restricted to the chosen rows, and sums."""
    clip_norm, style = optimizer.current_clip_norm, optimizer.clipping
    num_slots = {key: tf.size(choice.row_ids) for key, choice in choices.items()}
    with tf.control_dependencies([run.losses]):  # which follow the check of shapes
        restricted: Used = [
            (
                variable,
                use.restricted(choices[id(variable)].slots) if isinstance(use, Rows) else use,
            )
            for variable, use in run.uses
        ]
        found = clipping.clip(restricted, num_slots, clip_norm, run.losses, real, style)
    statistic = style.statistic(found.squared_norms, clip_norm, real)
    wanted = optimizer.diagnostics.isolation.some_unseen()
    not_zero = clipping.not_zero(run.uses, run.losses, wanted)
    sums, counts = _private_sums(model, found, choices), count_examples(found, real)
    return BatchSums(sums, counts, statistic, not_zero)


def count_examples(
    found: clipping.ClippedSums | clipping.Scaled, real: tf.Tensor, dtype: tf.DType = tf.int64
) -> tf.Tensor:
    """`BatchSums.counts`, `[3]` of `dtype`, of the examples for which `real` is not 0."""
    examples = real > 0
    kinds = examples, examples & found.finite & found.clipped, examples & ~found.finite
    return tf.reduce_sum(tf.cast(tf.stack(kinds), dtype), axis=1)


def _private_sums(model: keras.Model, sums: clipping.ClippedSums, choices: Choices) -> PrivateSums:
    """The clipped sums, with zeros for variables that this batch's records did not reach.

    They are noised all the same.
    """
    reached = {id(variable): total for variable, total in sums.dense}
    tables = [
        (
            table,
            tf.IndexedSlices(
                rows, choices[id(table)].row_ids, tf.constant(list(table.shape), tf.int64)
            ),
        )
        for table, rows in sums.tables
    ]
    dense = [
        (variable, reached.get(id(variable), tf.zeros(variable.shape)))
        for variable in model.trainable_variables
        if id(variable) not in choices
    ]
    return PrivateSums(dense, tables)
