"""A batch: its examples, its marker, and that nothing else looks like one."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dp_sparse.core.config import fingerprint
from dp_sparse.sampling.batch import (
    SEEDED,
    Examples,
    Marker,
    batch_of,
    is_sampled,
    new_nonce,
    real_examples,
    sampled_batch,
)
from dp_sparse.sampling.poisson import PoissonSampling


def batch() -> tuple[Any, Any, dict[str, Any]]:
    ones = np.ones(2, np.float32)
    return sampled_batch(np.zeros(2), np.zeros(2), ones, ones, Marker(7, 8, 9))


def test_sampled_batch() -> None:
    _, _, weights = batch()
    assert weights["marker"].dtype == np.int64
    np.testing.assert_array_equal(weights["marker"], [[7, 8, 9, 0], [7, 8, 9, 1]])
    assert is_sampled(batch())


def test_a_batch_of_the_sampler_is_sampled() -> None:
    made = next(iter(PoissonSampling(9, 3, 1).batches((np.zeros(9), np.zeros(9)))))
    assert is_sampled(made)


@pytest.mark.parametrize(
    "data",
    [
        None,
        np.zeros(2),
        batch()[:2],
        list(batch()),
        (*batch(), 1),
        (0, 0, np.ones(2)),
        (0, 0, {}),
        (0, 0, {"sample_weight": 1, "present": 1}),
        (0, 0, batch()[2] | {"more": 1}),
    ],
)
def test_nothing_else_is_sampled(data: Any) -> None:
    assert not is_sampled(data)


def test_fingerprints_fit_a_marker_and_differ() -> None:
    prints = [fingerprint({"steps": steps}) for steps in range(1000)]
    assert len(set(prints)) == 1000
    assert all(0 <= each < 2**63 for each in prints)
    assert max(prints) > 2**62
    np.array(Marker(max(prints), 2**62, 2**40), np.int64)


def test_fingerprints_are_of_the_configuration_alone() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"a": 2, "b": 1})
    assert fingerprint({"steps": 3}) == 6792834103802305207  # the same in every process


def test_nonces() -> None:
    nonces = {new_nonce(None) for _ in range(1000)}
    assert len(nonces) == 1000 and min(nonces) > SEEDED and max(nonces) <= 2**62
    assert new_nonce(0) == new_nonce(5) == SEEDED


def examples() -> Examples:
    """Five of them, of two inputs and two outputs; the last one is padding, the second weighs 0."""
    first = tf.constant([1.0, 0, 2, 0, 1])
    second = tf.constant([[0.0, 0], [0, 0], [0, 0], [0, 3], [1, 1]])
    present = tf.constant([1.0, 1, 1, 1, 0])
    x = {"ids": tf.range(5)[:, tf.newaxis], "price": tf.range(5.0)}
    return Examples(x, tf.range(5), {"click": first, "rate": second}, present)


def test_a_batch_is_taken_apart() -> None:
    x, y, weights = batch()
    (own_x, own_y, sample_weight, present), marker = batch_of((x, y, weights))
    assert own_x is x and own_y is y and marker is weights["marker"]
    assert sample_weight is weights["sample_weight"] and present is weights["present"]


@pytest.mark.parametrize(("begin", "end"), [(0, 5), (0, 2), (1, 4), (3, 9), (2, 2)])
def test_a_part_has_every_leaf_of_its_examples(begin: int, end: int) -> None:
    whole = examples()
    part = whole.part(tf.constant(begin), end)
    for leaf, own in zip(tf.nest.flatten(whole), tf.nest.flatten(part), strict=True):
        np.testing.assert_array_equal(own, leaf[begin:end])


def test_what_is_padding_or_weighs_nothing_is_not_real() -> None:
    np.testing.assert_array_equal(real_examples(examples()), [1, 0, 1, 1, 0])
