"""Padding and weights of a batch."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dp_sparse.sampling.base import gathered_batches
from dp_sparse.sampling.batch import Marker, checked_weights, padded, presence
from dp_sparse.sampling.data_source import as_data_source


def test_padded() -> None:
    values = {"a": np.arange(3), "b": (np.ones((3, 2, 2), np.float16), np.array(["x", "yy", "z"]))}
    found = padded(values, 5)
    np.testing.assert_array_equal(found["a"], [0, 1, 2, 0, 0])
    matrices, words = found["b"]
    assert matrices.shape == (5, 2, 2) and matrices.dtype == np.float16
    assert matrices[:3].all() and not matrices[3:].any()
    assert words.tolist() == ["x", "yy", "z", "", ""]


def test_padded_bytes() -> None:
    """Text as TensorFlow gives it, an object array of bytes."""
    found = padded(np.array([b"x", b"yy"], object), 4)
    assert found.tolist() == [b"x", b"yy", b"", b""]


@pytest.mark.parametrize("count", [0, 4])
def test_padded_at_its_ends(count: int) -> None:
    found = padded(np.ones((count, 2)), 4)
    assert found.shape == (4, 2) and found.sum() == 2 * count


@pytest.mark.parametrize(("count", "expected"), [(0, [0, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1])])
def test_presence(count: int, expected: list[float]) -> None:
    found = presence(count, 3)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_weights_default_to_one() -> None:
    found = checked_weights(None, 3, None, np.zeros(3))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [1, 1, 1])


def test_weights_of_several_outputs() -> None:
    found = checked_weights({"a": np.array([1, 2]), "b": np.array([0.0, 0.5])}, 2, None, None)
    np.testing.assert_array_equal(found["a"], [1, 2])
    np.testing.assert_array_equal(found["b"], [0, 0.5])
    assert found["a"].dtype == found["b"].dtype == np.float32


@pytest.mark.parametrize("weight", [-1e-9, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("nested", [False, True])
def test_bad_weights_are_refused(weight: float, nested: bool) -> None:
    bad = np.array([1.0, weight, 1.0])
    weights = {"good": np.ones(3), "bad": bad} if nested else bad
    message = f"Expected sample weights >= 0 and finite, got {weight}"
    with pytest.raises(ValueError, match=message):
        checked_weights(weights, 3, None, np.zeros(3))


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0, 2, 1]),
        np.array([0.0, 2.0, 1.0]),
        np.array([[0], [2], [1]]),
        np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]]),
    ],
)
def test_class_weights(labels: np.ndarray) -> None:
    weights = np.array([1.0, 10.0, 0.0])
    found = checked_weights(weights, 3, {0: 0.5, 1: 7.0, 2: 3.0}, labels)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [0.5, 30.0, 0.0])


def test_class_weights_of_an_empty_batch() -> None:
    assert checked_weights(None, 0, {0: 1.0}, np.zeros(0, int)).shape == (0,)


@pytest.mark.parametrize("label", [2, -1, 0.5, math.nan])
def test_labels_without_class_weight_are_refused(label: float) -> None:
    """A soft label has none: it is not rounded to a class."""
    with pytest.raises(ValueError, match=f"class_weight for every label, got none for .*{label}"):
        checked_weights(None, 3, {0: 1.0, 1: 2.0}, np.array([0, label, 1]))


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_bad_class_weights_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        checked_weights(None, 2, {0: 1.0, 1: weight}, np.array([0, 1]))


@pytest.mark.parametrize("labels", [{"a": np.zeros(2)}, (np.zeros(2), np.zeros(2))])
def test_class_weights_of_several_outputs_are_refused(labels: Any) -> None:
    with pytest.raises(ValueError, match="Expected one output with class_weight"):
        checked_weights(None, 2, {0: 1.0}, labels)


def test_an_example_twice_in_a_batch_is_refused() -> None:
    """It would add twice the clip norm, whatever sampler made the batch."""
    source = as_data_source((np.arange(6.0), np.ones(6)))
    draws = lambda: iter([(np.array([1, 4, 1]), Marker(7, 2, 0))])  # noqa: E731
    batches = gathered_batches(source, draws, (0, 4), 1)
    with pytest.raises(tf.errors.OpError, match="at most once in a batch, got one twice"):
        next(iter(batches))
