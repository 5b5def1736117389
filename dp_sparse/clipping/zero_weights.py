"""Replaces weights that are 0 by random numbers, in passes that only check.

A head of zeros, as many models begin with, hides whatever is behind it: activations that mix
examples change nothing, and no gradient comes back. A pass that shall show what training will do
later is run with other weights there. No variable changes.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.core import replicas

_SOME = 257  # rows of a table
_FILL: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("fill", default=None)


@contextlib.contextmanager
def filling_zeros(wanted: tf.Tensor) -> Iterator[None]:
    """Traces what is inside so that it replaces weights that are 0 where `wanted`, bool scalar."""
    token = _FILL.set(wanted)
    try:
        yield
    finally:
        _FILL.reset(token)


def filled_weights(
    model: keras.Model, tables: Sequence[keras.Variable]
) -> Mapping[int, Callable[[], tf.Tensor]]:
    """By the id of a weight that is all 0 as the pass is traced, its value there.

    Inside of `filling_zeros` that is random numbers of the size of an initialiser's.

    Args:
        model: The model.
        tables: Weights that are too large to be read whole; see `filled_rows`.
    """
    wanted = _FILL.get()
    if wanted is None:
        return {}
    of_lookups, found = set(map(id, tables)), {}
    for number, variable in enumerate(model.trainable_variables):
        if id(variable) in of_lookups:
            continue
        with tf.init_scope():
            value = tf.convert_to_tensor(variable._value)
            if not bool(tf.reduce_all(tf.equal(value, 0))):
                continue
            scale = 1 / np.sqrt(max(np.prod(variable.shape[:-1]), 4.0))
            made = tf.random.stateless_normal(tf.shape(value), [number, 7], stddev=scale)
            made = tf.cast(tf.abs(made), value.dtype)  # what may not be negative is no exception
        found[id(variable)] = functools.partial(tf.where, wanted, made, value)
    return found


def filled_rows(table: keras.Variable, row_ids: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Looked up rows `[..., width]`, to which a function of their ids is added in a table of zeros.

    Whether it is one is read off its first rows.
    """
    wanted = _FILL.get()
    if wanted is None:
        return rows
    with tf.init_scope():
        first = tf.gather(replicas.own_copy(table._value), tf.range(min(table.shape[0], _SOME)))
        if not bool(tf.reduce_mean(tf.cast(tf.reduce_all(first == 0, 1), tf.float32)) > 0.5):
            return rows  # a row of padding may be another one
        known = np.random.default_rng(7).normal(scale=0.5, size=(_SOME, table.shape[1]))
        made = tf.constant(known, rows.dtype)
    return rows + tf.cast(wanted, rows.dtype) * tf.gather(made, row_ids % _SOME)
