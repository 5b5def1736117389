"""What an update may use of what a step computed, and what it may not."""

import gc
import weakref
from typing import Any

import pytest
import tensorflow as tf

from dp_sparse.core.errors import PrivacyError
from tests.clipping.guarded_steps import updating


def of_another_function(values: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda: 2 * values, autograph=False)()


@pytest.mark.parametrize(
    "change",
    [
        lambda allowed, other, weights: weights - 0.1 * allowed,
        lambda allowed, other, weights: tf.cond(
            tf.reduce_sum(weights) > 0, lambda: allowed, lambda: -weights
        ),
        lambda allowed, other, weights: of_another_function(allowed),
        lambda allowed, other, weights: tf.constant([1.0, 2.0, 3.0]),
    ],
    ids=["step of SGD", "branch", "function", "constant"],
)
def test_an_update_may_use_what_is_allowed(change: Any) -> None:
    updating(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda allowed, other, weights: weights - 0.1 * other,
        lambda allowed, other, weights: tf.cond(
            tf.reduce_sum(other) > 0, lambda: allowed, lambda: -weights
        ),
        lambda allowed, other, weights: tf.cond(
            tf.reduce_sum(weights) > 0, lambda: allowed, lambda: other
        ),
        lambda allowed, other, weights: of_another_function(other),
        lambda allowed, other, weights: allowed * tf.cast(tf.size(tf.where(other)), tf.float32),
    ],
    ids=["data", "branch on data", "data in a branch", "function", "count"],
)
def test_an_update_may_use_nothing_else(change: Any) -> None:
    with pytest.raises(PrivacyError, match="uses .*, which the step computed of its batch"):
        updating(change)


@pytest.mark.parametrize("leaves", [False, True], ids=["assigned", "used elsewhere"])
def test_looked_up_rows_are_data(leaves: bool) -> None:
    """A read of a variable is harmless; which of its rows were read is not."""
    table = tf.Variable(tf.ones([4, 3]))
    ids = lambda y: tf.cast(y[:, 0], tf.int32)  # noqa: E731
    rows = lambda y: tf.reduce_sum(tf.gather(table, ids(y)), 0)  # noqa: E731
    with pytest.raises(PrivacyError, match="uses .*, which the step computed of its batch"):
        updating(lambda allowed, other, weights: other, rows, leaves)
    fixed = lambda y: tf.reduce_sum(tf.gather(table, [0, 2]), 0)  # noqa: E731
    updating(lambda allowed, other, weights: other, fixed, leaves)


@pytest.mark.parametrize("leaves", [False, True], ids=["assigned", "used elsewhere"])
def test_what_is_used_elsewhere_is_checked_as_what_is_assigned(leaves: bool) -> None:
    updating(lambda allowed, other, weights: allowed + weights, leaves=leaves)
    updating(lambda allowed, other, weights: 0.1, leaves=True)
    with pytest.raises(PrivacyError, match="uses .*, which the step computed of its batch"):
        updating(lambda allowed, other, weights: tf.reduce_sum(other) * weights, leaves=leaves)


def test_an_update_runs_no_python() -> None:
    def python(allowed: Any, other: Any, weights: Any) -> Any:
        python = lambda: tf.py_function(lambda: tf.ones([3]), [], tf.float32)  # noqa: E731
        return tf.ensure_shape(tf.function(python, autograph=False)(), [3])

    with pytest.raises(PrivacyError, match=r"\(EagerPyFunc\): runs Python code"):
        updating(python)


@pytest.mark.slow
def test_a_step_whose_update_was_read_is_not_kept() -> None:
    graph = weakref.ref(updating(lambda allowed, other, weights: allowed).graph)
    gc.collect()
    assert graph() is None
