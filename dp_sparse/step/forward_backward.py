"""One forward and one backward pass over a batch: losses, and the gradient terms of variables.

The clipped sums of a batch follow from a pass over it, the step's rows and clipping.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import Amounts, ClippedSums, Rows, Terms, Tied
from dp_sparse.core import UnsupportedLayerError, replicas, xla
from dp_sparse.optimizers import PrivateOptimizer, rows_of_replicas
from dp_sparse.sampling import Examples, real_examples
from dp_sparse.selection import StepChoice, StepRows, TableLookups
from dp_sparse.step import metrics
from dp_sparse.step.losses import per_example_losses
from dp_sparse.step.own_loss import own_loss_of


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass, and the backward pass to what was recorded.

    Attributes:
        outputs: The model's predictions.
        losses: Per-example losses, float32 `[batch]`, 0 for padding; 0 for all if the model gives
            one number for the batch.
        logged: The same for logs; the mean for all if the model gives one number.
        output_losses: The same for each output whose loss Keras tracks by itself.
        terms: The joined term of each variable; of the tables also those not looked up.
    """

    outputs: Any
    losses: tf.Tensor
    logged: tf.Tensor
    output_losses: list[tf.Tensor]
    terms: Terms


def passed(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    examples: Examples,
    draw: noise.Draw,
    part: tf.Tensor | int = 0,
) -> Pass:
    """One forward and one backward pass over a part of the batch, 0 being all of it.

    Args:
        model: As `private_train_step`.
        optimizer: Its optimizer.
        examples: The batch, or a part of it.
        draw: The step's streams.
        part: Which part it is.

    Raises:
        PrivacyError: When the step runs, if something that is recorded does not lead with the
            batch; nothing of the losses can be used then.
        UnsupportedLayerError: A layer whose per-example gradients cannot be had.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        settle = None if xla.static_shapes() else optimizer.before_lookup(draw)
        recording = record(model, optimizer, examples, tape, draw, settle, part)
        found = losses_of(model, examples, recording)
    with clipping.guarded():
        cotangents = tape.gradient(found.total, recording.targets)
    used = _terms(optimizer, recording, cotangents, tf.shape(examples.present)[0])
    losses = led_by_batch(used, found.of_examples, examples.present)
    with tf.control_dependencies([losses]):
        logged = losses if found.logged is found.of_examples else tf.identity(found.logged)
    return Pass(recording.outputs, losses, logged, found.of_outputs, used)


class Losses(NamedTuple):
    """The losses of a pass.

    Attributes:
        of_examples: As `Pass.losses`.
        logged: As there.
        of_outputs: As `Pass.output_losses`.
        total: The scalar whose gradient is that of each example's loss in its own records.
    """

    of_examples: tf.Tensor
    logged: tf.Tensor
    of_outputs: list[tf.Tensor]
    total: tf.Tensor


def losses_of(model: keras.Model, examples: Examples, recording: clipping.Recording) -> Losses:
    """The losses of a pass that is recorded, the model's own or those it was compiled with."""
    own = own_loss_of(model, examples)
    if own is not None:
        losses, logged, total = own.of_examples(recording.loss)
        return Losses(losses, logged, [], total)
    losses, of_outputs = losses_with_padding(model, examples, recording.outputs)
    return Losses(losses, losses, of_outputs, tf.reduce_sum(losses))


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass alone.

    Attributes:
        outputs: The model's predictions.
        terms: As of `Pass`, with zeros for gradients.
    """

    outputs: Any
    terms: Terms


def forward(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> Forward:
    """A pass over the whole batch without losses, of which only what is asked for is computed.

    With losses all of it would be: TensorFlow runs every assertion of a traced function, and a loss
    may assert that its labels have the shape of the outputs.
    """
    recording = record_forward(model, optimizer, examples, draw)
    nothing = [tf.zeros_like(target) for target in recording.targets]
    used = _terms(optimizer, recording, nothing, tf.shape(examples.present)[0])
    return Forward(recording.outputs, used)


def led_by_batch(terms: Terms, losses: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    """The losses, once they and all that was recorded were found to have one lead, the batch's."""
    named = clipping.recorded_tensors(terms, losses)
    checks = clipping.require_batch_leads(named, present)
    with tf.control_dependencies(checks):
        return tf.identity(losses)


def record(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    examples: Examples,
    tape: tf.GradientTape,
    draw: noise.Draw,
    before_lookup: clipping.BeforeLookup | None,
    part: tf.Tensor | int = 0,
) -> clipping.Recording:
    """The forward pass alone, with the model's own loss, under the seeds of this part."""
    return clipping.record(
        model,
        examples.x,
        tape,
        optimizer.examples_in_memory,
        secret_seeds(draw, part),
        before_lookup,
        own_loss_of(model, examples),
        functools.partial(shared_uniforms, draw),
    )


def record_forward(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> clipping.Recording:
    """The same of the whole batch, without gradients; noise that is due to its rows is added."""
    with tf.GradientTape(watch_accessed_variables=False) as unused:
        return record(model, optimizer, examples, unused, draw, optimizer.before_lookup(draw))


def secret_seeds(draw: noise.Draw, part: tf.Tensor | int = 0) -> clipping.Seeds:
    """Seeds of the pass's random layers.

    Masks must come from secret randomness: one example more gives every later example the mask of
    another position, which is another draw of the same distribution only to who does not know it.
    """
    return functools.partial(
        noise.seed_state, draw, part * replicas.count() + replicas.own_number()
    )


def shared_uniforms(draw: noise.Draw, number: int, count: int) -> tf.Tensor:
    """Uniform numbers of a layer that draws alike for all parts and replicas, float64 `[count]`.

    As kernels of XLA compute them, too: rows must be the same in the pass before such a kernel.
    """
    return noise.uniform(draw, noise.Purpose.NEGATIVES + number, tf.constant(count))


def checked_examples(run: Pass, examples: Examples) -> tf.Tensor:
    """`real_examples`, once what the pass records was found to lead with the batch."""
    with tf.control_dependencies([run.losses]):
        return tf.identity(real_examples(examples))


def losses_with_padding(
    model: keras.Model, examples: Examples, y_pred: Any
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Per-example losses, 0 for padding, and those of each output."""
    present = examples.present
    sample_weight = tf.nest.map_structure(lambda w: w * _column(present, w), examples.sample_weight)
    return per_example_losses(model, examples.y, y_pred, sample_weight)


def _column(present: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.reshape(present, [-1] + [1] * (weights.shape.rank - 1))


def _terms(
    optimizer: PrivateOptimizer,
    recording: clipping.Recording,
    cotangents: list[tf.Tensor | None],
    batch: tf.Tensor,
) -> Terms:
    with clipping.guarded():
        joined = recording.terms(cotangents)
    used = [(variable, _as_split(optimizer, variable, term)) for variable, term in joined]
    return [*used, *_unused_tables(optimizer, used, batch)]


def _as_split(
    optimizer: PrivateOptimizer, variable: keras.Variable, term: clipping.GradientTerm
) -> Any:
    """The term of a variable as a table or as a dense variable, as the optimizer holds it.

    Raises:
        UnsupportedLayerError: A table is read whole, as it was not when the optimizer was built.
    """
    is_table = any(variable is table for table in optimizer.tables)
    if is_table and not isinstance(term, Rows):
        raise UnsupportedLayerError(
            f"{variable.path}: used as a table in some calls and as a matrix in others. Untie the "
            "output layer (tie_weights=False), or call it in every pass."
        )
    if isinstance(term, Rows) and not is_table:
        return Tied.of_lookups(variable, term)
    return term


def _unused_tables(optimizer: PrivateOptimizer, terms: Terms, batch: tf.Tensor) -> Terms:
    """Tables that this batch never looked up: they get false rows, or dense noise, all the same."""
    used = {id(variable) for variable, _ in terms}
    ids = tf.zeros([batch, 0], tf.int64)
    return [
        (table, Rows(ids, tf.cast(ids, tf.bool), tf.zeros([batch, 0, table.shape[1]])))
        for table in optimizer.tables
        if id(table) not in used
    ]


def at_once(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[ClippedSums, dict[str, Any]]:
    """Sums over the examples, and Keras' logs over those that are real."""
    run, sums = _run(model, optimizer, examples, draw)
    return sums, metrics.update(model, examples, run.outputs, run.logged, run.output_losses)


def in_one_kernel(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[ClippedSums, dict[str, Any]]:
    """The same with all but the metrics in one kernel of XLA; the batch has its full capacity.

    What must be written before rows are read is written before the kernel, in a pass of which
    TensorFlow keeps no more than the ids.
    """
    if optimizer.delays_noise:
        record_forward(model, optimizer, examples, draw)

    def body() -> dict[str, Any]:
        run, sums = _run(model, optimizer, examples, draw)
        return {
            "sums": (sums.amounts, list(sums.row_ids), sums.to_remember),
            "losses": (run.logged, run.output_losses),
            "outputs": run.outputs,
        }

    got = xla.compiled(body)
    sums = _without_filler(optimizer, *got["sums"])
    return sums, metrics.update(model, examples, got["outputs"], *got["losses"])


def _run(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[Pass, ClippedSums]:
    run = passed(model, optimizer, examples, draw)
    real = checked_examples(run, examples)
    choice = rows_of_step(optimizer, run.terms, real, draw)
    return run, clipped_sums(optimizer, run, choice, real)


def _without_filler(
    optimizer: PrivateOptimizer,
    amounts: Amounts,
    row_ids: list[tf.Tensor],
    to_remember: tuple[tf.Tensor, ...],
) -> ClippedSums:
    """The rows that there are, of those that XLA filled up to their capacity."""
    tables = optimizer.tables
    there = [own < table.shape[0] for own, table in zip(row_ids, tables, strict=True)]
    rows, row_ids = (
        [tf.boolean_mask(values, kept) for values, kept in zip(each, there, strict=True)]
        for each in (amounts.rows, row_ids)
    )
    amounts = amounts._replace(rows=rows)
    return ClippedSums(optimizer.dense_variables, tables, row_ids, amounts, to_remember)


def rows_of_step(
    optimizer: PrivateOptimizer, terms: Terms, real: tf.Tensor, draw: noise.Draw
) -> StepChoice:
    """The step's rows, chosen over all tables at once, before any clipping."""
    term_of = {id(variable): term for variable, term in terms if isinstance(term, Rows)}
    with tf.control_dependencies([real]):  # which follows the check of shapes
        row_ids = {id(table): tf.identity(term_of[id(table)].row_ids) for table in optimizer.tables}
    lookups = [
        TableLookups(
            table.shape[0],
            row_ids[id(table)],
            term.voting & (real > 0)[:, tf.newaxis],
            term.cotangents,
        )
        for table, term in ((table, term_of[id(table)]) for table in optimizer.tables)
    ]
    public = [term_of[id(table)].public_ids for table in optimizer.tables]
    return rows_of_replicas(optimizer, lookups, public, draw)


def clipped_sums(
    optimizer: PrivateOptimizer,
    run: Pass,
    choice: StepChoice,
    real: tf.Tensor,
) -> ClippedSums:
    """Clips each example's gradient, restricted to the chosen rows, and sums.

    Variables that the records of this batch did not reach get zeros, and noise all the same.
    """
    clip_norm, style = optimizer.current_clip_norm, optimizer.clipping
    step_rows = _by_table(optimizer, choice.rows)
    num_rows = {key: tf.size(rows.row_ids) for key, rows in step_rows.items()}
    with tf.control_dependencies([run.losses]):  # which follow the check of shapes
        restricted: Terms = [
            (
                variable,
                _restricted(term, step_rows[id(variable)]) if isinstance(term, Rows) else term,
            )
            for variable, term in run.terms
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
    row_ids = [rows.row_ids for rows in choice.rows]
    return ClippedSums(dense, tables, row_ids, amounts, choice.to_remember)


def _by_table(optimizer: PrivateOptimizer, rows: list[StepRows]) -> dict[int, StepRows]:
    return {id(table): own for table, own in zip(optimizer.tables, rows, strict=True)}


def _restricted(term: Rows, rows: StepRows) -> Rows:
    return term.restricted(rows.places, rows.row_ids)
