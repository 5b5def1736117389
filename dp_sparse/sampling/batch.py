"""The shape of a private batch: its examples, and the marker of its sampler.

A sampler's dataset yields `(x, y, {"sample_weight", "present", "marker"})`, as Keras passes it on,
all `[capacity, ...]`, so that `tf.distribute` can divide it among replicas. The training step
separates them once: the marker belongs to the whole batch, everything else to its examples.

The marker of a batch, which proves which sampler made it.

A marker, int64 `[capacity, 4]`, has for each example of a batch [fingerprint of the sampler, nonce
of the pass over the sampler, position of the batch in the pass, place of the example in the batch].
The training step refuses a batch that has no marker, is of another sampler, was seen before, or is
not whole: each would void the accounting. A nonce of 0 means that a seed made the batch, so its
sampling is not secret. A nonce of 1 means that its examples follow from its position, however often
and by whom they are read.

Batches have a fixed shape: real examples first, then zeros of weight 0.
"""

import functools
import threading
import time
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import tensorflow as tf

from dp_sparse.core import require, validate

SEEDED = 0
OWN_ORDER = 1
_KEYS = {"sample_weight", "present", "marker"}


class Marker(NamedTuple):
    """Where a batch came from: what an entry of its marker begins with."""

    fingerprint: int
    nonce: int
    position: int

    def of_examples(self, count: int, begin: int = 0) -> np.ndarray:
        """The marker of `count` examples of a batch from place `begin` on, `[count, 4]`."""
        fields = np.tile(np.array(self, np.int64), (count, 1))
        return np.column_stack([fields, np.arange(begin, begin + count, dtype=np.int64)])


def new_nonce(seed: int | None) -> int:
    """A number that names one pass over a sampler, larger than all before.

    `SEEDED` if a seed makes the pass predictable.
    """
    return SEEDED if seed is not None else _NONCES.next()


class _Nonces:
    """Increasing numbers: a later pass has the larger one.

    This also holds between processes, as far as their clocks agree.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, time.time_ns())
            return self._last


_NONCES = _Nonces()


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

    def of_data(self, weights_too: bool = False) -> "Examples":
        """Whether each leaf holds inputs or labels, or weights too, bool."""
        x, y, weights = (
            tf.nest.map_structure(lambda _, own=own: own, part)
            for part, own in ((self.x, True), (self.y, True), (self.sample_weight, weights_too))
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


def padded(values: Any, capacity: int) -> Any:
    """Every leaf `[n, ...]` of `values`, with zeros (empty text) up to `[capacity, ...]`."""

    def pad(leaf: np.ndarray) -> np.ndarray:
        leaf = np.asarray(leaf)
        nothing = b"" if leaf.dtype == object else np.zeros((), leaf.dtype)
        out = np.full((capacity, *leaf.shape[1:]), nothing, leaf.dtype)
        out[: len(leaf)] = leaf
        return out

    return tf.nest.map_structure(pad, values)


def tf_dtype(leaf: np.ndarray) -> tf.DType:
    """The dtype of a leaf in TensorFlow."""
    return tf.string if leaf.dtype.kind in "OSU" else tf.as_dtype(leaf.dtype)


def presence(count: int, capacity: int) -> np.ndarray:
    """float32 `[capacity]`: 1 for the first `count` examples, 0 for padding."""
    return (np.arange(capacity) < count).astype(np.float32)


def checked_weights(weights: Any, count: int, class_weight: dict[int, float] | None, y: Any) -> Any:
    """Sample weights float32 `[count]` (or a nest of them), times the class weight of each label.

    Raises:
        ValueError: A weight is negative or not finite, or a label has no class weight.
    """
    if weights is None:
        weights = np.ones(count, np.float32)
    for leaf in tf.nest.flatten(weights):
        bad = np.flatnonzero(~(np.isfinite(leaf) & (np.asarray(leaf) >= 0)))
        if bad.size:
            raise ValueError(
                f"Expected sample weights >= 0 and finite, got {float(np.ravel(leaf)[bad[0]])} in "
                f"a batch."
            )
    if class_weight is None:
        return tf.nest.map_structure(lambda leaf: np.asarray(leaf, np.float32), weights)
    factors = _class_factors(y, class_weight)
    return tf.nest.map_structure(lambda leaf: np.asarray(leaf, np.float32) * factors, weights)


def weight_check(weights: tf.Tensor, index: tf.Tensor) -> tf.Operation:
    """Fails if a weight of batch `index` is negative or not finite; float32 `[n]`."""
    bad = tf.boolean_mask(weights, ~(tf.math.is_finite(weights) & (weights >= 0)))
    message = "Expected sample weights >= 0 and finite, got {} in batch {}."
    return require(tf.equal(tf.size(bad), 0), ValueError, message, bad[:1], index)


def _class_factors(y: Any, class_weight: dict[int, float]) -> np.ndarray:
    _refuse_keys(class_weight)
    bad = {
        label: weight for label, weight in class_weight.items() if not validate.is_weight(weight)
    }
    if bad:
        raise ValueError(f"Expected every class_weight >= 0 and finite, got {bad}.")
    if tf.nest.is_nested(y):
        raise ValueError("Expected one output with class_weight, got several: use sample weights.")
    labels = np.asarray(y)
    if labels.ndim == 2:
        labels = labels.argmax(1) if labels.shape[1] > 1 else labels[:, 0]
    missing = sorted({float(label) for label in labels} - {float(label) for label in class_weight})
    if missing:
        raise ValueError(f"Expected a class_weight for every label, got none for {missing}.")
    return np.array([class_weight[int(label)] for label in labels], np.float32)


def _refuse_keys(class_weight: dict[Any, Any]) -> None:
    """Raises ValueError for class weights by output, or of labels that are no numbers."""
    for key, weight in class_weight.items():
        if isinstance(weight, dict):
            raise ValueError(
                f"Expected class_weight={{label: weight}} of one output, got {{{key!r}: {weight}}}"
                ": give each example its weights, (x, y, sample_weight), one for each output."
            )
        if isinstance(key, str | bytes):
            raise ValueError(
                f"Expected labels as keys of class_weight, got the text {key!r}: labels are "
                "numbers, {0: 1.0, 1: 2.0}; after JSON use "
                "{int(label): weight for label, weight in class_weight.items()}."
            )
