"""The shape of a private batch: its examples, and the marker of its sampler.

A sampler's dataset yields `(x, y, {"sample_weight", "present", "marker"})`, as Keras passes it on,
all `[capacity, ...]`, so that `tf.distribute` can divide it among replicas. The training step
separates them once: the marker belongs to the whole batch, everything else to its examples.
"""

import functools
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import tensorflow as tf

from dp_sparse.sampling.marker import Marker

_KEYS = {"sample_weight", "present", "marker"}


class Examples(NamedTuple):
    """Examples of a batch: all, a part, or some in another order; leaves `[examples, ...]`.

    Attributes:
        x: Inputs.
        y: Labels.
        sample_weight: Weights, float32; a nest of them for several outputs.
        present: 1 for real examples, 0 for padding; float32 `[examples]`.
    """

    x: Any
    y: Any
    sample_weight: Any
    present: tf.Tensor

    def part(self, begin: tf.Tensor | int, end: tf.Tensor | int) -> "Examples":
        """Those from `begin` on, before `end`."""
        places = tf.reshape(begin, [1]), tf.reshape(end, [1])  # once for all leaves
        return tf.nest.map_structure(lambda leaf: tf.strided_slice(leaf, *places), self)

    def of_data(self) -> "Examples":
        """Whether each leaf holds inputs or labels, bool."""
        x, y, weights = (
            tf.nest.map_structure(lambda _, own=own: own, part)
            for part, own in ((self.x, True), (self.y, True), (self.sample_weight, False))
        )
        return Examples(x, y, weights, False)


class Batch(NamedTuple):
    """A batch of a sampler.

    Attributes:
        examples: All of it, padding included.
        marker: int64 `[capacity, 4]`; see `marker`.
    """

    examples: Examples
    marker: tf.Tensor


def is_sampled(data: Any) -> TypeGuard[tuple[Any, Any, dict[str, Any]]]:
    """Whether `data` has the shape that the samplers give a batch."""
    return (
        isinstance(data, tuple)
        and len(data) == 3
        and isinstance(data[2], dict)
        and set(data[2]) == _KEYS
    )


def batch_of(data: tuple[Any, Any, dict[str, Any]]) -> Batch:
    """What a sampler's dataset yields, or its signature, taken apart."""
    x, y, weights = data
    present = weights["present"]
    sample_weight = weights_of_outputs(y, weights["sample_weight"], present)
    return Batch(Examples(x, y, sample_weight, present), weights["marker"])


def weights_of_outputs(y: Any, sample_weight: Any, ones: Any) -> Any:
    """Weights for each output that has labels; those that were given none get `ones`.

    Raises:
        ValueError: Weights by name without labels of these names.
    """
    if not isinstance(sample_weight, dict):
        return sample_weight
    if not isinstance(y, dict) or not set(sample_weight) <= set(y):
        labels = sorted(y) if isinstance(y, dict) else f"a {type(y).__name__}"
        raise ValueError(
            f"Expected sample weights with the names of labels, got weights for "
            f"{sorted(sample_weight)} and labels as {labels}: give y as a dictionary, too, by the "
            "names of the model's outputs."
        )
    return {name: sample_weight.get(name, ones) for name in y}


def sampled_batch(
    x: Any, y: Any, sample_weight: Any, present: np.ndarray, marker: Marker, begin: int = 0
) -> tuple[Any, Any, dict[str, Any]]:
    """The batch as a dataset yields it, or its part from place `begin` on."""
    weights = {
        "sample_weight": sample_weight,
        "present": present,
        "marker": marker.of_examples(len(present), begin),
    }
    return x, y, weights


def real_examples(examples: Examples) -> tf.Tensor:
    """1 for examples that count, 0 for padding and weight 0; float32 `[examples]`."""
    used = [
        tf.reduce_any(tf.reshape(weight > 0, [tf.shape(weight)[0], -1]), axis=1)
        for weight in tf.nest.flatten(examples.sample_weight)
    ]
    return examples.present * tf.cast(functools.reduce(tf.logical_or, used), tf.float32)
