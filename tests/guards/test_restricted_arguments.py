"""Which arguments of a graph may not hold any value, wherever the operation is that says so."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dp_sparse.guards.restricted_arguments import restricted

Function = Callable[[Any, Any], Any]


@tf.function
def looked_up(x: tf.Tensor) -> tf.Tensor:
    return tf.gather(tf.ones([9]), tf.cast(x, tf.int32))


def in_a_loop(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """What a turn of the loop looks up comes from x in the turn before."""

    def turn(i: Any, now: Any, then: Any) -> Any:
        return i + 1, then, looked_up(now)

    return y + tf.while_loop(lambda i, *_: i < 3, turn, (0, tf.ones([2]), x))[1]


RESTRICTED: dict[str, Function] = {
    "a cast that is looked up": lambda x, y: y + tf.gather(y, 1 + tf.cast(2 * x, tf.int64)),
    "a cast to a size": lambda x, y: y + tf.ones([tf.cast(tf.reduce_sum(x), tf.int32), 1]),
    "a function": lambda x, y: y + looked_up(x + 1),
    "a branch": lambda x, y: tf.cond(tf.reduce_all(y > 0), lambda: looked_up(x), lambda: y),
    "a loop": in_a_loop,
    "an assertion": lambda x, y: [tf.debugging.assert_positive(x), x * y][1],
    "a check": lambda x, y: tf.debugging.check_numerics(x, "x") * y,
    "a decomposition": lambda x, y: y + tf.linalg.cholesky(x[:, None] * x[None, :])[0],
}
FREE: dict[str, Function] = {
    "arithmetic": lambda x, y: tf.exp(x) * y,
    "a cast": lambda x, y: y + tf.cast(tf.cast(2 * x, tf.int64), tf.float32),
    "a bucket of several": lambda x, y: tf.one_hot(tf.cast(4 * x, tf.int32), 4) * y[:, None],
    "a comparison": lambda x, y: tf.cast(tf.cast(x > y, tf.int32), tf.float32),
    "its shape": lambda x, y: x * y * tf.ones([tf.cast(tf.cast(tf.size(x), tf.float32), tf.int32)]),
    "a loop": lambda x, y: tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v * y), (0, x)),
}


def turns(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """As many as the largest x says."""
    most = tf.reduce_max(x)
    return tf.while_loop(lambda i, _: i < most, lambda i, v: (i + 1, v + 1), (0, y))[1]


OF_INTEGERS: dict[str, Function] = {
    "an index": lambda x, y: y + tf.gather(tf.range(9), x + 1),
    "an index of a function": lambda x, y: y + tf.cast(looked_up(x), tf.int32),
    "classes": lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(
        x, tf.cast(y[:, None] * [[1, 2]], tf.float32)
    ),
    "a divisor": lambda x, y: y + 6 // x,
    "a size": lambda x, y: y + tf.fill([tf.reduce_sum(x)], 2)[0],
    "a segment": lambda x, y: y[0] + tf.math.segment_sum([1, 2], x)[0],
    "a count": lambda x, y: y[0] + tf.math.bincount(x, minlength=3, maxlength=3),
    "turns of a loop": turns,
    "a table's rows": lambda x, y: y + tf.math.abs(tf.gather(tf.constant([1, 2]), tf.abs(x))),
}
FREE_INTEGERS: dict[str, Function] = {
    "pixels": lambda x, y: tf.cast(x, tf.float32) / 255.0 * tf.cast(y, tf.float32),
    "a comparison": lambda x, y: tf.where(x > 3, y, 0),
    "one of several": lambda x, y: tf.one_hot(x, 3) * tf.cast(y[:, None], tf.float32),
    "hashed": lambda x, y: (
        tf.cast(y, tf.float32)
        + tf.gather(tf.ones([9]), tf.strings.to_hash_bucket_fast(tf.strings.as_string(x), 9))
    ),
    "its size": lambda x, y: x * y * tf.fill([tf.size(x)], 2),
    "columns": lambda x, y: tf.concat([x[:1], tf.reshape(y, [-1])], 0),
}


def of(function: Function, dtype: tf.DType = tf.float32) -> list[bool]:
    spec = tf.TensorSpec([2], dtype)
    graph = tf.function(function, autograph=False).get_concrete_function(spec, spec).graph
    found = restricted(graph)
    return [argument.ref() in found for argument in graph.inputs]


@pytest.mark.parametrize("case", RESTRICTED)
def test_x_is_restricted_and_y_is_not(case: str) -> None:
    assert of(RESTRICTED[case]) == [True, False]


@pytest.mark.parametrize("case", FREE)
def test_both_may_hold_anything(case: str) -> None:
    assert of(FREE[case]) == [False, False]


@pytest.mark.parametrize("case", OF_INTEGERS)
def test_the_integer_x_is_restricted_and_y_is_not(case: str) -> None:
    assert of(OF_INTEGERS[case], tf.int32) == [True, False]


@pytest.mark.parametrize("case", FREE_INTEGERS)
def test_both_may_be_any_integer(case: str) -> None:
    assert of(FREE_INTEGERS[case], tf.int32) == [False, False]
