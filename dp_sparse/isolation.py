"""Checks on real batches that the loss of one example is its own.

Clipping bounds what one example adds to a sum; it bounds nothing if the example also changes the
gradients of others. The first batches of a process pay for six more forward passes to find out.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from dp_sparse import replicas
from dp_sparse.errors import PrivacyError, require

BATCHES = 3
COUPLED = (
    "The loss of one example depends on another example of its batch, or on its place in it, so "
    "clipping each example would not bound its influence. Remove what mixes examples (batch "
    "statistics, contrastive or in-batch losses) or knows their order."
)
_TOLERANCE = 1e-4  # relative: rounding may differ with the other rows of a product


class Losses(NamedTuple):
    """What a forward pass gives: losses `[batch]`, recorded tensors, whether it drew seeds."""

    losses: tf.Tensor
    targets: list[tf.Tensor]
    random: bool


LossesOf = Callable[[Any, Any, tf.GradientTape], Losses]  # of x and y


def checks(
    losses_of: LossesOf, batch: tuple[Any, Any], present: tf.Tensor, counter: tf.Variable
) -> list[tf.Operation]:
    """Operations that fail unless, in this batch, each example's loss is its own.

    ∂loss[0]/∂z[1:] must be exactly 0 for every recorded z. And every loss must stay when copies of
    another example take the place of half of the batch: this also sees what mixes examples before
    the first layer, inside one, along the batch, or by way of the labels. Without random layers it
    must stay, too, when the first example goes and the others move up: neither the place in the
    batch nor its size may matter.

    Args:
        losses_of: The model's forward pass.
        batch: `(x, y)`.
        present: float32 `[batch]`; a batch with fewer than two real examples proves nothing.
        counter: int64 scalar: batches that passed so far; after three, nothing is done.
    """
    done = counter.read_value()
    due = (done < BATCHES) & (tf.math.count_nonzero(present) > 1)
    leaked = tf.cond(due, lambda: coupled(losses_of, batch), lambda: tf.constant(False))
    required = [require(~leaked, PrivacyError, COUPLED)]
    with tf.control_dependencies(required):
        replicas.merged(functools.partial(_count_passed, counter, done), tf.cast(due, tf.int64))
    return required


def coupled(losses_of: LossesOf, batch: tuple[Any, Any]) -> tf.Tensor:
    """Whether the loss of one example of `(x, y)` is seen to depend on another; bool scalar."""
    x, y = tf.nest.map_structure(_finite, batch)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        losses, targets, random = losses_of(x, y, tape)
        first = losses[0]
    cotangents = tape.gradient(first, targets, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    others = [tf.convert_to_tensor(cotangent)[1:] for cotangent in cotangents]
    # 0 · NaN is no dependence: a non-finite example has NaN derivatives everywhere.
    leaks = [tf.reduce_any(tf.not_equal(o, 0) & ~tf.math.is_nan(o)) for o in others]
    moves = [_moves_with_others(losses_of, (x, y), losses)]
    if not random:  # masks belong to positions
        moves.append(_moves_with_position(losses_of, (x, y), losses))
    return tf.reduce_any(tf.stack([*leaks, *moves]))


def _count_passed(counter: tf.Variable, done: tf.Tensor, due: Any) -> None:
    """One batch more if some replica had enough of it to check."""
    counter.assign(done + tf.minimum(replicas.summed(due), 1))


def _moves_with_others(losses_of: LossesOf, batch: tuple[Any, Any], losses: tf.Tensor) -> tf.Tensor:
    """Whether some example's loss changes when others are replaced by copies of one of the kept.

    Kept are, in turn, the first half, the second half, the even and the odd positions.
    """
    position = tf.range(tf.shape(losses)[0])
    first_half, even = position < (tf.size(position) + 1) // 2, tf.equal(position % 2, 0)
    kept = tf.stack([first_half, ~first_half, even, ~even])

    def moves(keep: tf.Tensor) -> tf.Tensor:
        copied = tf.cast(tf.argmax(tf.cast(keep, tf.int32)), tf.int32)  # the first one kept
        rows = tf.where(keep, position, copied)
        x, y = tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), batch)
        with tf.GradientTape(watch_accessed_variables=False) as unused:
            alone = losses_of(x, y, unused).losses
        return tf.reduce_any(keep & _differ(alone, losses))

    return tf.reduce_any(tf.map_fn(moves, kept, fn_output_signature=tf.bool))


def _moves_with_position(
    losses_of: LossesOf, batch: tuple[Any, Any], losses: tf.Tensor
) -> tf.Tensor:
    """Whether some example's loss changes when the first one goes, and all others move up."""
    x, y = tf.nest.map_structure(lambda leaf: leaf[1:], batch)
    with tf.GradientTape(watch_accessed_variables=False) as unused:
        moved_up = losses_of(x, y, unused).losses
    return tf.reduce_any(_differ(moved_up, losses[1:]))


def _differ(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.abs(left - right) > _TOLERANCE * (1 + tf.abs(right))


def _finite(value: tf.Tensor) -> tf.Tensor:
    """`value` with zeros for what is not finite."""
    return tf.where(tf.math.is_finite(value), value, 0) if value.dtype.is_floating else value
