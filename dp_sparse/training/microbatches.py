"""A logical batch of any size in fixed memory, part by part.

The rows of the whole batch are chosen first, from its ids alone; then each part is clipped with
those and added up. Noise comes later and once, so micro-batches change neither the guarantee
nor, but for rounding and dropout masks, the numbers.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import Amounts, ClippedSums, Rows
from dp_sparse.core import PrivacyError, require
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Examples, real_examples
from dp_sparse.selection import StepRows
from dp_sparse.training import batch_gradient, forward_backward, metrics
from dp_sparse.training.forward_backward import Forward, Pass


def by_parts(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    examples: Examples,
    draw: noise.Draw,
    size: int,
) -> tuple[ClippedSums, dict[str, Any]]:
    """Sums over the examples in parts of `size`, and Keras' logs.

    The first pass is there for its ids: nothing else of it is used, and so nothing else computed.
    """
    whole = forward_backward.forward(model, optimizer, examples, draw)
    _build_metrics(model, examples, whole)
    parts = _Parts(
        model, optimizer, examples, draw, size, *_step_rows(optimizer, whole, examples, draw)
    )
    nothing = clipping.zero_sums(optimizer.dense_variables, optimizer.tables, parts.row_ids)
    count = tf.shape(examples.present)[0]
    _, amounts = tf.while_loop(
        lambda begin, _: begin < count,
        lambda begin, before: (begin + size, before.plus(parts.amounts_of(begin))),
        (tf.constant(0), nothing.amounts),
        (tf.TensorShape([]), _shapes(nothing.amounts)),
        parallel_iterations=1,
    )
    return nothing.with_amounts(amounts), metrics.after_parts(model, amounts.counts)


def _step_rows(
    optimizer: PrivateOptimizer, whole: Forward, examples: Examples, draw: noise.Draw
) -> tuple[list[tf.Tensor], list[tuple[tf.Tensor, tf.Tensor]]]:
    """Of each table the rows of the step, and of each lookup in it its row and its place."""
    real = _examples_with_ids(whole, examples)
    step_rows = batch_gradient.rows_of_step(optimizer, whole.uses, real, draw)
    row_ids_of = {id(v): use.row_ids for v, use in whole.uses if isinstance(use, Rows)}
    keys = [id(table) for table in optimizer.tables]
    lookups = [(row_ids_of[key], step_rows[key].places) for key in keys]
    return [step_rows[key].row_ids for key in keys], lookups


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a batch whose rows are chosen.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        examples: The whole batch.
        draw: The step's streams.
        size: How many examples a part has, at most.
        row_ids: Of each table the rows of the step.
        lookups: Of each table the row and the place of each lookup of the batch.
    """

    model: keras.Model
    optimizer: PrivateOptimizer
    examples: Examples
    draw: noise.Draw
    size: int
    row_ids: list[tf.Tensor]
    lookups: list[tuple[tf.Tensor, tf.Tensor]]

    def amounts_of(self, begin: tf.Tensor) -> Amounts:
        """What the part from `begin` on adds to the sums; its examples also count in metrics."""
        model, optimizer, end = self.model, self.optimizer, begin + self.size
        own = self.examples.part(begin, end)
        lookups = [(row_ids[begin:end], places[begin:end]) for row_ids, places in self.lookups]
        part = 1 + begin // self.size
        run = forward_backward.passed(model, optimizer, own, self.draw, part)
        # Ids that do not lead with the batch cannot be compared, which the losses wait to know.
        with tf.control_dependencies([run.losses]):
            checks = _same_rows(run, optimizer.tables, lookups)
        with tf.control_dependencies(checks):
            step_rows = {
                id(table): StepRows(row_ids, tf.identity(places))
                for table, row_ids, (_, places) in zip(
                    optimizer.tables, self.row_ids, lookups, strict=True
                )
            }
        real = forward_backward.checked_examples(run, own)
        sums = batch_gradient.clipped_sums(optimizer, run, step_rows, real)
        metrics.update(model, own, run.outputs, run.losses, run.output_losses, is_part=True)
        return sums.amounts


def _examples_with_ids(whole: Forward, examples: Examples) -> tf.Tensor:
    """The real examples, once the ids were found to lead with the batch; parts check the rest."""
    ids = [(v.path, use.row_ids) for v, use in whole.uses if isinstance(use, Rows)]
    with tf.control_dependencies(clipping.require_batch_leads(ids, examples.present)):
        return tf.identity(real_examples(examples))


def _same_rows(run: Pass, tables: list[keras.Variable], lookups: Any) -> list[tf.Operation]:
    """Fails if a part looks up other rows than the first pass did: norms would not fit the sums."""
    own = {id(variable): use.row_ids for variable, use in run.uses if isinstance(use, Rows)}
    message = (
        "The rows that an example looks up changed between two passes over it: ids that depend on "
        "random layers cannot be trained with microbatch_size. Leave it out."
    )
    return [
        require(tf.reduce_all(tf.equal(own[id(table)], row_ids)), PrivacyError, message)
        for table, (row_ids, _) in zip(tables, lookups, strict=True)
    ]


def _shapes(amounts: Amounts) -> Amounts:
    """What a loop keeps of them: any number of rows."""
    of_rows = [tf.TensorShape([None, rows.shape[1]]) for rows in amounts.rows]
    return tf.nest.map_structure(lambda each: each.shape, amounts)._replace(rows=of_rows)


def _build_metrics(model: keras.Model, examples: Examples, whole: Forward) -> None:
    """Creates what Keras would create at its first update, which cannot be inside a loop."""
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        metrics.build(examples.y, whole.outputs)
