"""Which arguments of a graph may not hold any value, wherever the operation is that says so."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from dp_sparse.clipping.restricted_arguments import restricted

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
    "a cast": lambda x, y: y + tf.cast(tf.cast(2 * x, tf.int64), tf.float32),
    "a function": lambda x, y: y + looked_up(x + 1),
    "a branch": lambda x, y: tf.cond(tf.reduce_all(y > 0), lambda: looked_up(x), lambda: y),
    "a loop": in_a_loop,
    "an assertion": lambda x, y: [tf.debugging.assert_positive(x), x * y][1],
    "a check": lambda x, y: tf.debugging.check_numerics(x, "x") * y,
    "a decomposition": lambda x, y: y + tf.linalg.cholesky(x[:, None] * x[None, :])[0],
}
FREE: dict[str, Function] = {
    "arithmetic": lambda x, y: tf.exp(x) * y,
    "a comparison": lambda x, y: tf.cast(tf.cast(x > y, tf.int32), tf.float32),
    "its shape": lambda x, y: x * y * tf.ones([tf.cast(tf.cast(tf.size(x), tf.float32), tf.int32)]),
    "a loop": lambda x, y: tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v * y), (0, x)),
}


def of(function: Function) -> list[bool]:
    spec = tf.TensorSpec([2], tf.float32)
    graph = tf.function(function, autograph=False).get_concrete_function(spec, spec).graph
    found = restricted(graph)
    return [argument.ref() in found for argument in graph.inputs]


@pytest.mark.parametrize("case", RESTRICTED)
def test_x_is_restricted_and_y_is_not(case: str) -> None:
    assert of(RESTRICTED[case]) == [True, False]


@pytest.mark.parametrize("case", FREE)
def test_both_may_hold_anything(case: str) -> None:
    assert of(FREE[case]) == [False, False]
