"""One forward and one backward pass over a batch: losses, and the recorded uses of variables."""

import contextlib
import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, isolation, noise, replicas, xla
from dp_sparse.clipping.uses import Rows, Use
from dp_sparse.errors import PrivacyError
from dp_sparse.losses import per_example_losses
from dp_sparse.optimizers import PrivateOptimizer

Used = list[tuple[keras.Variable, Use]]


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


def run(
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
        recording = record(model, optimizer, x, tape, draw, settle, part)
        with _without_tables(optimizer):
            losses, of_outputs = losses_with_padding(model, y, recording.outputs, weights)
        total = tf.reduce_sum(losses)
    used = recording.uses(tape.gradient(total, recording.targets))
    used += _unused_tables(optimizer, used, tf.shape(losses)[0])
    return Pass(recording.outputs, losses, of_outputs, used)


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
