"""The distinct values of a list, and places in a sorted list; under XLA with static shapes."""

import dataclasses
import math

import tensorflow as tf

from dp_sparse.core import xla


@dataclasses.dataclass(frozen=True)
class Groups:
    """The distinct values of a list.

    Attributes:
        values: `[groups]`, each once, in no particular order. Under XLA they are sorted, and
            filled up to the length of the list.
        places: int32 `[elements]`: the place in `values` of each element's value.
    """

    values: tf.Tensor
    places: tf.Tensor


def grouped(elements: tf.Tensor, filler: int) -> Groups:
    """The groups of integers; O(elements), under XLA one sort.

    Args:
        elements: `[elements]`.
        filler: What `values` is filled up with under XLA.
    """
    if not xla.static_shapes():
        return Groups(*tf.unique(elements))
    order = tf.argsort(elements)
    ordered = tf.gather(elements, order)
    begins = tf.concat([tf.ones_like(ordered[:1], tf.bool), ordered[1:] != ordered[:-1]], 0)
    group = (tf.cumsum(tf.cast(begins, tf.int32)) - 1)[:, tf.newaxis]
    places = tf.scatter_nd(order[:, tf.newaxis], group[:, 0], tf.shape(elements))
    filled = tf.fill(tf.shape(elements), tf.cast(filler, elements.dtype))
    return Groups(tf.tensor_scatter_nd_update(filled, group, ordered), places)


def lower_bound(ordered: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """How many of `ordered`, which increases, are below each of `values`; int32 of their shape.

    O(values · log ordered). XLA's own search would compare every pair.
    """
    if not xla.static_shapes():
        return tf.searchsorted(ordered, values)
    size = ordered.shape[0]
    assert size is not None, "XLA needs a static shape"
    if not size:
        return tf.zeros_like(values, tf.int32)
    steps = max(1, math.ceil(math.log2(size + 1)))

    def halved(step: tf.Tensor, below: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        further = below + tf.bitwise.left_shift(1, steps - 1 - step)
        fits = (further <= size) & (tf.gather(ordered, tf.minimum(further, size) - 1) < values)
        return step + 1, tf.where(fits, further, below)

    # A loop, since XLA would compute unrolled steps again for each of their many uses.
    start = tf.constant(0), tf.zeros_like(values, tf.int32)
    return tf.while_loop(lambda step, _: step < steps, halved, start)[1]
