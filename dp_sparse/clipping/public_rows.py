"""Rows that a step draws without looking at its batch, such as negatives, in a recorded pass.

A layer draws their ids by `shared_uniforms`, once for all examples of a step, and reads the rows
either by `scored_by`, which records the scores of each example against them, or by a lookup inside
`public_lookups`, which every example makes alike.

### Formal Guarantees
The ids come from random numbers of the step and from public ones, so which rows they are tells
nothing of the batch: they join the rows of the step without a vote, and get its noise. An id that
does depend on the batch is found by the checks beside the step, which compare ids in other batches
of the same examples.
"""

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from dp_sparse.clipping.graph_guard import own_operations
from dp_sparse.core import UnsupportedLayerError

SharedUniforms = Callable[[int, int], tf.Tensor]  # of a number in the pass, and how many


class _Pass:
    """A pass that is recorded, and how many layers have drawn in it."""

    def __init__(
        self, uniforms: SharedUniforms | None, layers: Iterable[keras.layers.Layer]
    ) -> None:
        self.uniforms, self.numbers = uniforms, itertools.count()
        self.layers = {id(layer) for layer in layers}


@dataclasses.dataclass
class Scoring:
    """A lookup that gives scores.

    Attributes:
        queries: Float `[batch, width]` or `[batch, positions, width]`.
        is_recorded: Whether the lookup was recorded, and gave scores `[batch, ..., rows]`, not
            rows.
    """

    queries: tf.Tensor
    is_recorded: bool = False


_PASS: contextvars.ContextVar[_Pass | None] = contextvars.ContextVar("pass", default=None)
_SCORING: contextvars.ContextVar[Scoring | None] = contextvars.ContextVar("scoring", default=None)
_PUBLIC: contextvars.ContextVar[bool] = contextvars.ContextVar("public", default=False)


@contextlib.contextmanager
def recorded_pass(
    uniforms: SharedUniforms | None, layers: Iterable[keras.layers.Layer]
) -> Iterator[None]:
    """A pass whose layers draw by these numbers; by None they may not."""
    token = _PASS.set(_Pass(uniforms, layers))
    try:
        yield
    finally:
        _PASS.reset(token)


def shared_uniforms(layer: keras.layers.Layer, count: int) -> tf.Tensor | None:
    """Uniform numbers, float64 `[count]`, the same for all examples, parts and replicas of a step.

    Args:
        layer: The layer that asks, one of the model's: what it was made from is checked there.
        count: How many.

    Returns:
        None outside of a recorded pass.

    Raises:
        UnsupportedLayerError: In a loop that has none, or a layer that is none of the model's.
    """
    own = _PASS.get()
    if own is None:
        return None
    path = layer.path or layer.name
    if id(layer) not in own.layers:
        raise UnsupportedLayerError(
            f"{path} ({type(layer).__name__}): is called by the model and is none of its layers, "
            "so no plan knows what it was made from. Make it an attribute of the model."
        )
    if own.uniforms is None:
        raise UnsupportedLayerError(
            f"{path}: loops of dp_sparse.distribution draw no negatives. Train it with fit, or "
            "give negatives as data."
        )
    with own_operations():
        return own.uniforms(next(own.numbers), count)


@contextlib.contextmanager
def scored_by(queries: tf.Tensor) -> Iterator[Scoring]:
    """An Embedding called inside, in a recorded pass, gives scores of its rows instead of rows."""
    scoring = Scoring(queries)
    token = _SCORING.set(scoring)
    try:
        yield scoring
    finally:
        _SCORING.reset(token)


def scoring() -> Scoring | None:
    """What the lookup that is being recorded shall score."""
    return _SCORING.get()


@contextlib.contextmanager
def public_lookups() -> Iterator[None]:
    """Lookups inside are of rows that were drawn for all examples alike."""
    token = _PUBLIC.set(True)
    try:
        yield
    finally:
        _PUBLIC.reset(token)


def are_public() -> bool:
    """Whether the lookup that is being recorded is one of these."""
    return _PUBLIC.get()
