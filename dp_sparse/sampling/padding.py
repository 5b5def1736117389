"""Batches of fixed shape: real examples first, then zeros of weight 0. O(batch)."""

from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import require, validate


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
