"""One step of several replicas: what needs the whole batch is computed once and given to all.

Each replica of a `tf.distribute` strategy clips its own part of a batch. What needs the whole batch
(its marker, the selection of rows, the noise, every write) happens in `merged`, once a process,
with `gathered` and `summed` values that are the same on all replicas. Without a strategy these
functions do nothing: there is one replica.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from dp_sparse.core.errors import PrivacyError

T = TypeVar("T")


def count() -> int:
    """How many replicas the current strategy has; 1 without a strategy."""
    replicas: int = tf.distribute.get_strategy().num_replicas_in_sync
    return replicas


def own_number() -> int:
    """The number of the replica that runs this, from 0 on; each has its own part of the graph.

    In a strategy's scope, but outside of its replicas, it is 0.
    """
    context = tf.distribute.get_replica_context()
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))


def merged(function: Callable[..., T], *args: Any) -> T:
    """What `function` returns, called once for all replicas of a process; each of them gets it.

    Args:
        function: Takes `args`, of which nested tensors are those of all replicas, to be read by
            `gathered` and `summed` alone. Whatever else it uses must be equal on all replicas.
        *args: The arguments of this replica.
    """
    if count() == 1:
        return function(*args)
    context = tf.distribute.get_replica_context()
    if context is None:
        raise PrivacyError(
            "Expected a step inside of a replica, got one in the strategy's scope, outside of all "
            "replicas. Train with fit, or with dp_sparse.distribution.train."
        )
    own = tf.nest.map_structure(tf.identity, args)  # a tensor of its own for each replica
    return context.merge_call(lambda strategy, *all_args: function(*all_args), own)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Keeps what runs inside from reading anything of the other replicas.

    Raises:
        PrivacyError: It calls `merge_call` or `all_reduce`.
    """
    context = tf.distribute.get_replica_context()
    if count() == 1 or context is None:  # None: not in a replica, but in the strategy's scope
        yield
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise PrivacyError(
            "Expected a model and a loss that see the examples of one replica, got a merge_call or "
            "an all_reduce, which mixes those of all. Remove what synchronises replicas."
        )

    context.merge_call = refuse
    try:
        yield
    finally:
        del context.merge_call


def gathered(value: Any) -> tf.Tensor:
    """Inside `merged`: the replicas' tensors `[own, ...]`, one after another."""
    if count() == 1:
        return value
    strategy = tf.distribute.get_strategy()
    inner = strategy.experimental_local_results(value)[0].shape[1:]
    return tf.ensure_shape(strategy.gather(value, axis=0), [None, *inner])


def summed(values: Any) -> Any:
    """Inside `merged`: the sums over replicas of nested tensors."""
    if count() == 1:
        return values
    strategy = tf.distribute.get_strategy()
    leaves = tf.nest.flatten(values)
    sums = strategy.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM, [(leaf, leaf) for leaf in leaves]
    )
    of_first = [strategy.experimental_local_results(each)[0] for each in (*sums, *leaves)]
    shaped = [
        tf.ensure_shape(total, own.shape)
        for total, own in zip(of_first[: len(sums)], of_first[len(sums) :], strict=True)
    ]
    return tf.nest.pack_sequence_as(values, shaped)


def parts(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Divides values that all replicas have, so that Keras' sum over replicas gives the values.

    Every replica does the same, since the workers' graphs must have the same collectives.
    """
    return list(values) if count() == 1 else [value / count() for value in values]


def own_copy(variable: tf.Variable) -> tf.Variable:
    """This replica's copy of `variable`: its rows can be read without reading all of it."""
    copies = tf.distribute.get_strategy().experimental_local_results(variable)
    return copies[own_number() % len(copies)]


def update(variables: Sequence[tf.Variable], function: Callable[..., None]) -> None:
    """Inside `merged`: `function(*copies)` on each device of this process, with its copies."""
    strategy = tf.distribute.get_strategy()
    for copies in zip(*map(strategy.experimental_local_results, variables), strict=True):
        with tf.device(copies[0].device):
            function(*copies)


def undistributed(make: Callable[[], T]) -> T:
    """What `make` returns, its `tf.Variable`s made outside of every strategy.

    Each variable exists once. The scope of a strategy belongs to a thread, so `make` is called in
    another one.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as outside:
        return outside.submit(make).result()


def rare_branch(branch: Callable[[], Any]) -> Callable[[], Any]:
    """`branch` for `tf.cond`, as a function that is called and not written out.

    TensorFlow writes both branches out into the graph around them, and visits each operation of the
    one that is not taken in every step. Where it is taken, a call costs more. Of several replicas
    each writes it out: what is refused inside of a call would reach the user as a cancelled step.
    """
    if count() > 1:
        return branch
    return tf.function(branch, autograph=False, experimental_attributes={"_noinline": True})
