"""Reads a traced graph: which variables an operation takes, by whatever function it calls."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.core import graphs


def handles_of(variables: Sequence[keras.Variable | tf.Variable]) -> dict[Any, str]:
    """The handle of every copy of the variables that a strategy keeps, with the variable's path."""
    copies_of = tf.distribute.get_strategy().experimental_local_results
    values = [(v, v.name) if isinstance(v, tf.Variable) else (v.value, v.path) for v in variables]
    return {copy.handle.ref(): path for value, path in values for copy in copies_of(value)}


def origin_of(tensor: tf.Tensor, handles: dict[Any, str]) -> str | None:
    """The path of the handle that a tensor is, also if a function captured it; else None."""
    while tensor.ref() not in handles:
        outside = graphs.captured_as(tensor)
        if not outside:
            return None
        [tensor] = outside
    return handles[tensor.ref()]


def passed_on(op: tf.Operation, function: tf.Graph, handles: dict[Any, str]) -> dict[Any, str]:
    """The arguments of a function that are such handles, with their paths."""
    if not handles:
        return {}
    given = [pair for pair in graphs.arguments(op, function) if pair[0].dtype == tf.resource]
    origins = [(inside, origin_of(outside, handles)) for outside, inside in given]
    return {inside.ref(): path for inside, path in origins if path is not None}
