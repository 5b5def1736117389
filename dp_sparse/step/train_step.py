"""The private train step, from its batch to its update.

One recorded forward pass and one backward pass to the pre-activations, then selection, clipping and
noise from the records (DP-AdaFEST, Algorithm 1). `compile_hook` gives it to a model.

With micro-batches, a logical batch of any size takes fixed memory, part by part.

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
from dp_sparse.core import PrivacyError, replicas, require
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Examples, batch_of, is_sampled, real_examples
from dp_sparse.selection import StepChoice, StepRows
from dp_sparse.step import environment, forward_backward, metrics, unsupported
from dp_sparse.step.building import build_for
from dp_sparse.step.forward_backward import Forward, Pass


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
    real = _examples_with_ids(whole, examples)
    choice = forward_backward.rows_of_step(optimizer, whole.terms, real, draw)
    parts = _Parts(model, optimizer, examples, draw, size, choice, _row_ids(optimizer, whole))
    nothing = clipping.zero_sums(
        optimizer.dense_variables,
        optimizer.tables,
        [rows.row_ids for rows in choice.rows],
        choice.to_remember,
    )
    count = tf.shape(examples.present)[0]
    _, amounts = tf.while_loop(
        lambda begin, _: begin < count,
        lambda begin, before: (begin + size, before.plus(parts.amounts_of(begin))),
        (tf.constant(0), nothing.amounts),
        (tf.TensorShape([]), _shapes(nothing.amounts)),
        parallel_iterations=1,
    )
    return nothing.with_amounts(amounts), metrics.after_parts(model, amounts.counts)


def _row_ids(optimizer: PrivateOptimizer, whole: Forward) -> list[tf.Tensor]:
    """The row of each lookup of the batch, for each table."""
    row_ids_of = {id(v): term.row_ids for v, term in whole.terms if isinstance(term, Rows)}
    return [row_ids_of[id(table)] for table in optimizer.tables]


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a batch whose rows are chosen.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        examples: The whole batch.
        draw: The step's streams.
        size: How many examples a part has, at most.
        choice: The rows of the step.
        lookups: Of each table the row of each lookup of the batch.
    """

    model: keras.Model
    optimizer: PrivateOptimizer
    examples: Examples
    draw: noise.Draw
    size: int
    choice: StepChoice
    lookups: list[tf.Tensor]

    def amounts_of(self, begin: tf.Tensor) -> Amounts:
        """What the part from `begin` on adds to the sums; its examples also count in metrics."""
        model, optimizer, end = self.model, self.optimizer, begin + self.size
        own = self.examples.part(begin, end)
        lookups = [row_ids[begin:end] for row_ids in self.lookups]
        part = 1 + begin // self.size
        run = forward_backward.passed(model, optimizer, own, self.draw, part)
        # Ids that do not lead with the batch cannot be compared, which the losses wait to know.
        with tf.control_dependencies([run.losses]):
            checks = _same_rows(run, optimizer.tables, lookups)
        with tf.control_dependencies(checks):
            own_rows = [
                StepRows(rows.row_ids, tf.identity(rows.places[begin:end]))
                for rows in self.choice.rows
            ]
        real = forward_backward.checked_examples(run, own)
        sums = forward_backward.clipped_sums(optimizer, run, StepChoice(own_rows), real)
        metrics.update(model, own, run.outputs, run.logged, run.output_losses, is_part=True)
        return sums.amounts


def _examples_with_ids(whole: Forward, examples: Examples) -> tf.Tensor:
    """The real examples, once the ids were found to lead with the batch; parts check the rest."""
    ids = [(v.path, term.row_ids) for v, term in whole.terms if isinstance(term, Rows)]
    with tf.control_dependencies(clipping.require_batch_leads(ids, examples.present)):
        return tf.identity(real_examples(examples))


def _same_rows(
    run: Pass, tables: list[keras.Variable], lookups: list[tf.Tensor]
) -> list[tf.Operation]:
    """Fails if a part looks up other rows than the first pass did: norms would not fit the sums."""
    own = {id(variable): term.row_ids for variable, term in run.terms if isinstance(term, Rows)}
    message = (
        "The rows that an example looks up changed between two passes over it: ids that depend on "
        "random layers cannot be trained with microbatch_size. Leave it out."
    )
    return [
        require(tf.reduce_all(tf.equal(own[id(table)], row_ids)), PrivacyError, message)
        for table, row_ids in zip(tables, lookups, strict=True)
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


def private_train_step(
    model: keras.Model, optimizer: PrivateOptimizer, data: Any
) -> dict[str, Any]:
    """One step of private training on one batch of the plan's sampler.

    Args:
        model: A model compiled with `optimizer`.
        optimizer: The private optimizer.
        data: `(x, y, weights)` as `plan.sampling.batches` makes it.

    Returns:
        Training loss and metrics over the real examples: not private.

    Raises:
        PrivacyError: A batch that the plan's sampler did not make, used before, or after the last
            step.
        BadExampleError: An id or a label out of range, or a value that is not finite where this
            machine's products would pass it on.
        ValueError: x lacks an input of the model.
        UnsupportedLayerError: A layer whose per-example gradients cannot be had.
    """
    _refuse(optimizer, data)
    examples, marker = batch_of(data)
    examples = examples._replace(x=clipping.named_inputs(model, examples.x))
    if not optimizer.compiles:
        examples = _trimmed(examples)
    if not optimizer.built:
        build_for(model, optimizer, examples)
    draw, spent = optimizer.begin_step(marker)
    with tf.control_dependencies([spent]):
        examples = environment.refuse_nan(model, tf.nest.map_structure(tf.identity, examples))
        examples = unsupported.refuse_wrapped(model, examples)
    sums, logs = _clipped_sums(model, optimizer, examples, draw)
    sums = sums.over_replicas()
    with tf.control_dependencies([sums.amounts.counts]):  # counts of steps wait for every check
        noisy = replicas.merged(lambda: optimizer.release(sums, draw))
        with clipping.update_from(noisy.tensors()):
            optimizer.update(noisy)
        replicas.merged(lambda: optimizer.remember(sums.to_remember, draw, spent - 1))
        replicas.merged(lambda: _count(optimizer, sums))
    return logs


def _refuse(optimizer: PrivateOptimizer, data: Any) -> None:
    """Raises PrivacyError for data that is no batch of a sampler, or where it cannot be a step."""
    if not is_sampled(data):
        raise PrivacyError(
            "Expected a batch made by this plan's sampler, got one without its marker: train with "
            "model.fit(plan.sampling.batches(dataset)). Batches made any other way void the "
            "plan's accounting."
        )
    refuse_other_strategy(optimizer)
    if optimizer.compiles and data[2]["present"].shape[0] is None:
        raise PrivacyError(
            "Expected batches of a fixed size with jit_compile=True, got some of unknown size: "
            "pass the sampler's own batches, without batch or unbatch."
        )


def refuse_other_strategy(optimizer: PrivateOptimizer) -> None:
    """Raises PrivacyError for a step under another strategy than that of the optimizer."""
    if tf.distribute.get_strategy() is not optimizer._distribution_strategy:
        raise PrivacyError(
            f"Expected a step under the strategy of the optimizer, "
            f"{type(optimizer._distribution_strategy).__name__}, got "
            f"{type(tf.distribute.get_strategy()).__name__}: build and compile the model inside "
            "strategy.scope()."
        )


def _clipped_sums(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[ClippedSums, dict[str, Any]]:
    """Sums over the examples, and Keras' logs, by what `compile` and the optimizer ask for."""
    if optimizer.compiles:
        return forward_backward.in_one_kernel(model, optimizer, examples, draw)
    size = optimizer.microbatch_size
    if size is None:
        return forward_backward.at_once(model, optimizer, examples, draw)
    return by_parts(model, optimizer, examples, draw, size)


def _count(optimizer: PrivateOptimizer, sums: ClippedSums) -> None:
    """Adds to the running totals that reports read."""
    totals = optimizer.diagnostics
    totals.add(sums.amounts.counts)
    if optimizer.tables and optimizer.selects_rows:  # else which rows were looked up would be told
        totals.rows.assign_add(tf.stack([tf.size(own, tf.int64) for own in sums.row_ids]))


def _trimmed(examples: Examples) -> Examples:
    """The examples without the padding after the last real one, but two of them at least.

    Padding is there for a fixed shape between the sampler and the step; nothing in the graph needs
    it. Python then does not know the size of the batch, and the model cannot depend on it there.
    """
    present = examples.present
    capacity = tf.shape(present)[0]
    last = tf.reduce_max(tf.where(present > 0, tf.range(1, capacity + 1), 0))
    return examples.part(0, tf.minimum(tf.maximum(last, 2), capacity))
