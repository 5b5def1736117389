"""The clipped sums of one batch: a recorded forward pass, a backward pass, selection, clipping."""

import contextlib
import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, isolation, metrics, noise, replicas, xla
from dp_sparse.clipping import uses
from dp_sparse.clipping.uses import Rows, Use
from dp_sparse.errors import PrivacyError
from dp_sparse.losses import per_example_losses
from dp_sparse.optimizers import PrivateOptimizer, PrivateSums, RowChoice
from dp_sparse.optimizers.joint_choice import choose_together
from dp_sparse.selection.contribution import TableLookups

Used = list[tuple[keras.Variable, Use]]
Choices = dict[int, RowChoice]  # by the id of the table


@dataclasses.dataclass(frozen=True)
class BatchSums:
    """What a batch, or a part of one, adds up to.

    Attributes:
        sums: Clipped sums of every trainable variable.
        counts: int64 `[3]`: real examples, how many of them were clipped, how many zeroed because
            they were not finite. Not private.
        statistic: What the clipping style releases beside the sums, before its noise; float64.
    """

    sums: PrivateSums
    counts: tf.Tensor
    statistic: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass, and the backward pass to what was recorded.

    Attributes:
        outputs: The model's predictions.
        losses: Per-example losses, float32 `[batch]`, 0 for padding.
        output_losses: The same for each output whose loss Keras tracks by itself.
        uses: The joined use of each variable; of the tables also those not looked up.
    """

    outputs: Any
    losses: tf.Tensor
    output_losses: list[tf.Tensor]
    uses: Used


def at_once(
    model: keras.Model, optimizer: PrivateOptimizer, batch: Any, draw: noise.Draw
) -> tuple[BatchSums, dict[str, Any]]:
    """Sums over the batch `(x, y, weights)`, and Keras' logs over its real examples."""
    run = run_pass(model, optimizer, batch, draw)
    choices = choose_rows(optimizer, run.uses, real_examples(batch), draw)
    sums = clipped_sums(model, optimizer, run, choices, real_examples(batch))
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
            _record(model, optimizer, batch[0], unused, draw, optimizer.before_lookup(draw))
    variables: tuple[list[keras.Variable], ...] = ([], [])

    def body() -> dict[str, Any]:
        run = run_pass(model, optimizer, batch, draw)
        choices = choose_rows(optimizer, run.uses, real_examples(batch), draw)
        found = clipped_sums(model, optimizer, run, choices, real_examples(batch))
        dense, tables = found.sums.dense, found.sums.tables
        variables[0][:], variables[1][:] = [v for v, _ in dense], [t for t, _ in tables]
        return {
            "dense": [total for _, total in dense],
            "rows": [(rows.values, rows.indices) for _, rows in tables],
            "counts": (found.counts, found.statistic),
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


def _without_filler(
    table: keras.Variable, values: tf.Tensor, row_ids: tf.Tensor
) -> tf.IndexedSlices:
    """The rows that there are, of a choice that XLA filled up to its capacity."""
    there = row_ids < table.shape[0]
    shape = tf.constant(list(table.shape), tf.int64)
    return tf.IndexedSlices(tf.boolean_mask(values, there), tf.boolean_mask(row_ids, there), shape)


def run_pass(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    batch: Any,
    draw: noise.Draw,
    part: tf.Tensor | int = 0,
) -> Pass:
    """One forward and one backward pass over a part of the batch, 0 being all of it."""
    x, y, weights = batch
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        settle = None if xla.inside() else optimizer.before_lookup(draw)
        recording = _record(model, optimizer, x, tape, draw, settle, part)
        with _without_tables(optimizer):
            losses, of_outputs = losses_with_padding(model, y, recording.outputs, weights)
        total = tf.reduce_sum(losses)
    used = recording.uses(tape.gradient(total, recording.targets))
    used += _unused_tables(optimizer, used, tf.shape(losses)[0])
    return Pass(recording.outputs, losses, of_outputs, used)


def _record(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    x: Any,
    tape: tf.GradientTape,
    draw: noise.Draw,
    before_lookup: clipping.BeforeLookup | None,
    part: tf.Tensor | int = 0,
) -> clipping.Recording:
    seeds = secret_seeds(draw, part)
    return clipping.record(model, x, tape, optimizer.examples_in_memory, seeds, before_lookup)


def _without_tables(optimizer: PrivateOptimizer) -> contextlib.AbstractContextManager[Any]:
    """Where noise is delayed, a loss that reads a table is refused: rows it reads may lack some."""
    return _NoTables(optimizer.tables) if optimizer.delays_noise else contextlib.nullcontext()


class _NoTables(keras.StatelessScope):
    def __init__(self, tables: list[keras.Variable]) -> None:
        super().__init__()
        self._tables = {id(table) for table in tables}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Keras asks here for every variable it reads."""
        if id(variable) in self._tables:
            raise PrivacyError(
                f"The loss reads {variable.path}, whose rows lack noise that this optimizer "
                "delays. Leave it out of the loss, or use DPSGDOptimizer."
            )
        return super().get_current_value(variable)


def secret_seeds(draw: noise.Draw, part: tf.Tensor | int = 0) -> clipping.Seeds:
    """Seeds of the pass's random layers.

    Masks must come from secret randomness: one example more gives every later example the mask of
    another position, which is another draw of the same distribution only to who does not know it.
    """
    return functools.partial(
        noise.seed_state, draw, part * replicas.count() + replicas.own_number()
    )


def real_examples(batch: Any) -> tf.Tensor:
    """1 for examples that count, 0 for padding and weight 0; float32 `[batch]`."""
    weights = batch[2]
    return weights["present"] * _any_weight(weights["sample_weight"])


def choose_rows(
    optimizer: PrivateOptimizer, uses: Used, real: tf.Tensor, draw: noise.Draw
) -> Choices:
    """The step's rows, chosen over all tables at once, before any clipping."""
    use_of = {id(variable): use for variable, use in uses if isinstance(use, Rows)}
    lookups = [
        TableLookups(
            table.shape[0], use.row_ids, use.valid & (real > 0)[:, tf.newaxis], use.cotangents
        )
        for table, use in ((table, use_of[id(table)]) for table in optimizer.tables)
    ]
    chosen = choose_together(optimizer, lookups, draw)
    return {id(t): choice for t, choice in zip(optimizer.tables, chosen, strict=True)}


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
    total = replicas.merged(replicas.summed, tf.nest.map_structure(uses.exact, own))
    slices = [
        tf.IndexedSlices(values, rows.indices, rows.dense_shape)
        for values, (_, rows) in zip(total["rows"], tables, strict=True)
    ]
    sums = PrivateSums(
        [(v, values) for (v, _), values in zip(dense, total["dense"], strict=True)],
        [(table, rows) for (table, _), rows in zip(tables, slices, strict=True)],
    )
    counts, statistic = total["rest"]
    return BatchSums(sums, tf.cast(counts, tf.int64), statistic)


def clipped_sums(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    run: Pass,
    choices: Choices,
    real: tf.Tensor,
) -> BatchSums:
    """Clips each example's gradient, restricted to the chosen rows, and sums."""
    restricted: Used = [
        (variable, use.restricted(choices[id(variable)].slots) if isinstance(use, Rows) else use)
        for variable, use in run.uses
    ]
    num_slots = {key: tf.size(choice.row_ids) for key, choice in choices.items()}
    clip_norm, style = optimizer.current_clip_norm, optimizer.clipping
    found = clipping.clip(restricted, num_slots, clip_norm, run.losses, real, style)
    examples = real > 0
    kinds = examples, examples & found.finite & found.clipped, examples & ~found.finite
    counts = tf.stack([tf.math.count_nonzero(kind) for kind in kinds])
    statistic = style.statistic(found.squared_norms, clip_norm, real)
    return BatchSums(_private_sums(model, found, choices), counts, statistic)


def losses_of(
    model: keras.Model, weights: dict[str, Any], capacity: int, draw: noise.Draw
) -> isolation.LossesOf:
    """The recorded forward pass with all weights 1, as the isolation checks call it."""

    def of(x: Any, y: Any, tape: tf.GradientTape) -> isolation.Losses:
        recording = clipping.record(model, x, tape, capacity, secret_seeds(draw))
        size = tf.shape(tf.nest.flatten(x)[0])[0]
        everyone = tf.nest.map_structure(
            lambda leaf: tf.ones_like(leaf[:size]), {**weights, "marker": weights["present"]}
        )
        losses, _ = losses_with_padding(model, y, recording.outputs, everyone)
        return isolation.Losses(losses, recording.targets, recording.seeds_drawn > 0)

    return of


def losses_with_padding(
    model: keras.Model, y: Any, y_pred: Any, weights: dict[str, Any]
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Per-example losses, 0 for padding, and those of each output."""
    present = weights["present"]
    sample_weight = tf.nest.map_structure(
        lambda w: w * _column(present, w), weights["sample_weight"]
    )
    return per_example_losses(model, y, y_pred, sample_weight)


def _column(present: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.reshape(present, [-1] + [1] * (weights.shape.rank - 1))


def _any_weight(sample_weight: Any) -> tf.Tensor:
    """1 for examples with some weight above 0, float32 `[batch]`: weight 0 means padding."""
    used = [
        tf.reduce_any(tf.reshape(weight > 0, [tf.shape(weight)[0], -1]), axis=1)
        for weight in tf.nest.flatten(sample_weight)
    ]
    return tf.cast(functools.reduce(tf.logical_or, used), tf.float32)


def _unused_tables(optimizer: PrivateOptimizer, uses: Used, batch: tf.Tensor) -> Used:
    """Tables that this batch never looked up: they get false rows, or dense noise, all the same."""
    used = {id(variable) for variable, _ in uses}
    ids = tf.zeros([batch, 0], tf.int64)
    return [
        (table, Rows(ids, tf.cast(ids, tf.bool), tf.zeros([batch, 0, table.shape[1]])))
        for table in optimizer.tables
        if id(table) not in used
    ]


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
