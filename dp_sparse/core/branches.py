"""Branches of a step that are hardly ever taken, at the cost of one operation."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dp_sparse.core import replicas


def seldom(branch: Callable[[], Any]) -> Callable[[], Any]:
    """`branch` for `tf.cond`, as a function that is called and not written out.

    TensorFlow writes both branches out into the graph around them, and visits each operation of the
    one that is not taken in every step. Where it is taken, a call costs more. Of several replicas
    each writes it out: what is refused inside of a call would reach the user as a cancelled step.
    """
    if replicas.count() > 1:
        return branch
    return tf.function(branch, autograph=False, experimental_attributes={"_noinline": True})
