"""The private train step, and the `compile` hook that installs it.

Importing `dp_sparse` wraps the `compile` found on `keras.Model`'s MRO. Compiling with a private
optimizer gives that model the private step; compiling with any other gives the stock step back. One
step: one recorded forward pass, one backward pass to the pre-activations, then selection, clipping
and noise from the records (DP-AdaFEST, Algorithm 1).
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import isolation
from dp_sparse.core import PrivacyError, replicas
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import is_sampled
from dp_sparse.training import (
    batch_gradient,
    forward_backward,
    microbatches,
)
from dp_sparse.training.building import build_for


def private_train_step(
    model: keras.Model, optimizer: PrivateOptimizer, data: Any
) -> dict[str, Any]:
    """One step of private training on one batch of the plan's sampler.

    Args:
        model: A model compiled with `optimizer`.
        optimizer: The private optimizer.
        data: `(x, y, weights)` as `plan.sampling.batches` makes it.

    Returns:
        Training loss and metrics over the real examples: not private.

    Raises:
        PrivacyError: A batch that the plan's sampler did not make, used before, or after the last
            step.
        BadExampleError: An id or a label out of range.
        UnsupportedLayerError: A layer whose per-example gradients cannot be had.
    """
    _refuse(optimizer, data)
    x, y, weights = data if optimizer.compiles else _trimmed(data)
    if not optimizer.built:
        build_for(model, optimizer, (x, y, weights))
    draw, spent = optimizer.begin_step(weights["marker"])
    with tf.control_dependencies([spent]):
        x = tf.nest.map_structure(tf.identity, x)
    # Traced first: a layer that initialises itself from its first batch is then seen to mix.
    checked = _checked_examples(optimizer, (x, y, weights))
    observer = forward_backward.observed(model, optimizer, checked, draw)
    size = optimizer.microbatch_size
    if optimizer.compiles:
        found, logs = batch_gradient.in_one_kernel(model, optimizer, (x, y, weights), draw)
    elif size is None:
        found, logs = batch_gradient.at_once(model, optimizer, (x, y, weights), draw)
    else:
        found, logs = microbatches.by_parts(model, optimizer, (x, y, weights), draw, size)
    with tf.control_dependencies(
        batch_gradient.tensors(found)
    ):  # whose pass then leaves the memory
        progress, present = optimizer.diagnostics.isolation, checked[2]["present"]
        progress.traced()
        checks = isolation.checks(observer, checked, present, progress, found.not_zero)
    found = batch_gradient.over_replicas(batch_gradient.after(checks, found))
    with tf.control_dependencies([found.counts]):  # counts of steps, too, wait for every check
        with clipping.update_from([*found.sums.tensors(), *draw.tensors()]):
            optimizer.apply_private(found.sums, draw)
        replicas.merged(functools.partial(_finish, optimizer, found, draw))
    return logs


def _refuse(optimizer: PrivateOptimizer, data: Any) -> None:
    """Raises PrivacyError for data that is no batch of a sampler, or where it cannot be a step."""
    if not is_sampled(data):
        raise PrivacyError(
            "Expected a batch made by this plan's sampler, got one without its marker: train with "
            "model.fit(plan.sampling.batches(dataset)). Batches made any other way void the "
            "plan's accounting."
        )
    if tf.distribute.get_strategy() is not optimizer._distribution_strategy:
        raise PrivacyError(
            f"Expected a step under the strategy of the optimizer, "
            f"{type(optimizer._distribution_strategy).__name__}, got "
            f"{type(tf.distribute.get_strategy()).__name__}: build and compile the model inside "
            "strategy.scope()."
        )
    if optimizer.compiles and data[2]["present"].shape[0] is None:
        raise PrivacyError(
            "Expected batches of a fixed size with jit_compile=True, got some of unknown size: "
            "pass the sampler's own batches, without batch or unbatch."
        )


def _finish(optimizer: PrivateOptimizer, found: batch_gradient.BatchSums, draw: noise.Draw) -> None:
    optimizer.end_step(found.statistic, draw)
    _count(optimizer, found)


def _checked_examples(optimizer: PrivateOptimizer, batch: Any) -> Any:
    """What isolation is checked on; of a large batch a micro-batch, so that memory stays fixed."""
    x, y, weights = batch
    batch = x, y, {**weights, "marker": weights["present"]}  # that of the batch fits no part
    if optimizer.microbatch_size is not None:
        batch = tf.nest.map_structure(lambda leaf: leaf[: optimizer.microbatch_size], batch)
    return batch


def _count(optimizer: PrivateOptimizer, found: batch_gradient.BatchSums) -> None:
    """Adds to the running totals that reports read."""
    totals = optimizer.diagnostics
    totals.add(found.counts)
    if optimizer.tables and optimizer.selects_rows:  # else which rows were looked up would be told
        of_table = {id(table): rows for table, rows in found.sums.tables}
        rows = [tf.size(of_table[id(table)].indices, tf.int64) for table in optimizer.tables]
        totals.rows.assign_add(tf.stack(rows))


def _trimmed(data: Any) -> Any:
    """The batch without the padding after its last real example, but of two examples at least.

    Padding is there for a fixed shape between the sampler and the step; nothing in the graph needs
    it.
    """
    x, y, weights = data
    present = weights["present"]
    capacity = tf.shape(present)[0]
    last = tf.reduce_max(tf.where(present > 0, tf.range(1, capacity + 1), 0))
    size = tf.minimum(tf.maximum(last, 2), capacity)
    marker = weights["marker"]
    x, y, weights = tf.nest.map_structure(
        lambda leaf: leaf[:size], (x, y, dict(weights, marker=present))
    )
    return x, y, dict(weights, marker=marker)
