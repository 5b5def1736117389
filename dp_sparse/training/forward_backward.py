"""One forward and one backward pass over a batch: losses, and the recorded uses of variables."""

import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import Rows, Tied, Used
from dp_sparse.core import UnsupportedLayerError, replicas, xla
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Examples, real_examples
from dp_sparse.training.losses import per_example_losses


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
        recording = record(model, optimizer, examples.x, tape, draw, settle, part)
        losses, of_outputs = losses_with_padding(model, examples, recording.outputs)
        total = tf.reduce_sum(losses)
    with clipping.guarded():
        cotangents = tape.gradient(total, recording.targets)
    used = _uses(optimizer, recording, cotangents, tf.shape(losses)[0])
    losses = led_by_batch(used, losses, examples.present)
    return Pass(recording.outputs, losses, of_outputs, used)


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass alone.

    Attributes:
        outputs: The model's predictions.
        uses: As of `Pass`, with zeros for gradients.
    """

    outputs: Any
    uses: Used


def forward(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> Forward:
    """A pass over the whole batch without losses, of which only what is asked for is computed.

    With losses all of it would be: TensorFlow runs every assertion of a traced function, and a loss
    may assert that its labels have the shape of the outputs.
    """
    recording = record_forward(model, optimizer, examples.x, draw)
    nothing = [tf.zeros_like(target) for target in recording.targets]
    used = _uses(optimizer, recording, nothing, tf.shape(examples.present)[0])
    return Forward(recording.outputs, used)


def led_by_batch(uses: Used, losses: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    """The losses, once they and all that was recorded were found to have one lead, the batch's."""
    named = clipping.recorded_tensors(uses, losses)
    checks = clipping.require_batch_leads(named, present)
    with tf.control_dependencies(checks):
        return tf.identity(losses)


def record(
    model: keras.Model,
    optimizer: PrivateOptimizer,
    x: Any,
    tape: tf.GradientTape,
    draw: noise.Draw,
    before_lookup: clipping.BeforeLookup | None,
    part: tf.Tensor | int = 0,
) -> clipping.Recording:
    """The forward pass alone, under the seeds of this part."""
    seeds = secret_seeds(draw, part)
    return clipping.record(model, x, tape, optimizer.examples_in_memory, seeds, before_lookup)


def record_forward(
    model: keras.Model, optimizer: PrivateOptimizer, x: Any, draw: noise.Draw
) -> clipping.Recording:
    """The same of the whole batch, without gradients; noise that is due to its rows is added."""
    with tf.GradientTape(watch_accessed_variables=False) as unused:
        return record(model, optimizer, x, unused, draw, optimizer.before_lookup(draw))


def secret_seeds(draw: noise.Draw, part: tf.Tensor | int = 0) -> clipping.Seeds:
    """Seeds of the pass's random layers.

    Masks must come from secret randomness: one example more gives every later example the mask of
    another position, which is another draw of the same distribution only to who does not know it.
    """
    return functools.partial(
        noise.seed_state, draw, part * replicas.count() + replicas.own_number()
    )


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


def _uses(
    optimizer: PrivateOptimizer,
    recording: clipping.Recording,
    cotangents: list[tf.Tensor | None],
    batch: tf.Tensor,
) -> Used:
    with clipping.guarded():
        joined = recording.uses(cotangents)
    used = [(variable, _as_split(optimizer, variable, use)) for variable, use in joined]
    return [*used, *_unused_tables(optimizer, used, batch)]


def _as_split(optimizer: PrivateOptimizer, variable: keras.Variable, use: clipping.Use) -> Any:
    """The use of a variable as a table or as a dense variable, as the optimizer holds it.

    Raises:
        UnsupportedLayerError: A table is read whole, as it was not when the optimizer was built.
    """
    is_table = any(variable is table for table in optimizer.tables)
    if is_table and not isinstance(use, Rows):
        raise UnsupportedLayerError(
            f"{variable.path}: used as a table in some calls and as a matrix in others. Untie the "
            "output layer (tie_weights=False), or call it in every pass."
        )
    if isinstance(use, Rows) and not is_table:
        return Tied.of_lookups(variable, use)
    return use


def _unused_tables(optimizer: PrivateOptimizer, uses: Used, batch: tf.Tensor) -> Used:
    """Tables that this batch never looked up: they get false rows, or dense noise, all the same."""
    used = {id(variable) for variable, _ in uses}
    ids = tf.zeros([batch, 0], tf.int64)
    return [
        (table, Rows(ids, tf.cast(ids, tf.bool), tf.zeros([batch, 0, table.shape[1]])))
        for table in optimizer.tables
        if id(table) not in used
    ]
