"""The private train step, from its batch to its update.

One recorded forward pass and one backward pass to the pre-activations, then selection, clipping and
noise from the records (DP-AdaFEST, Algorithm 1). `compile_hook` gives it to a model.
"""

from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.clipping import ClippedSums
from dp_sparse.core import PrivacyError, replicas
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Examples, batch_of, is_sampled
from dp_sparse.training import (
    batch_gradient,
    microbatches,
    nan_in_bfloat16,
    wrapped_ids,
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
        BadExampleError: An id or a label out of range, or a value that is not finite where this
            machine's products would pass it on.
        ValueError: x lacks an input of the model.
        UnsupportedLayerError: A layer whose per-example gradients cannot be had.
    """
    _refuse(optimizer, data)
    examples, marker = batch_of(data)
    examples = examples._replace(x=clipping.named_inputs(model, examples.x))
    if not optimizer.compiles:
        examples = _trimmed(examples)
    if not optimizer.built:
        build_for(model, optimizer, examples)
    draw, spent = optimizer.begin_step(marker)
    with tf.control_dependencies([spent]):
        examples = nan_in_bfloat16.refuse_nan(model, tf.nest.map_structure(tf.identity, examples))
        examples = wrapped_ids.refuse_wrapped(model, examples)
    sums, logs = _clipped_sums(model, optimizer, examples, draw)
    sums = sums.over_replicas()
    with tf.control_dependencies([sums.amounts.counts]):  # counts of steps wait for every check
        noisy = replicas.merged(lambda: optimizer.release(sums, draw))
        with clipping.update_from(noisy.tensors()):
            optimizer.update(noisy)
        replicas.merged(lambda: _count(optimizer, sums))
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


def _clipped_sums(
    model: keras.Model, optimizer: PrivateOptimizer, examples: Examples, draw: noise.Draw
) -> tuple[ClippedSums, dict[str, Any]]:
    """Sums over the examples, and Keras' logs, by what `compile` and the optimizer ask for."""
    if optimizer.compiles:
        return batch_gradient.in_one_kernel(model, optimizer, examples, draw)
    size = optimizer.microbatch_size
    if size is None:
        return batch_gradient.at_once(model, optimizer, examples, draw)
    return microbatches.by_parts(model, optimizer, examples, draw, size)


def _count(optimizer: PrivateOptimizer, sums: ClippedSums) -> None:
    """Adds to the running totals that reports read."""
    totals = optimizer.diagnostics
    totals.add(sums.amounts.counts)
    if optimizer.tables and optimizer.selects_rows:  # else which rows were looked up would be told
        totals.rows.assign_add(tf.stack([tf.size(own, tf.int64) for own in sums.row_ids]))


def _trimmed(examples: Examples) -> Examples:
    """The examples without the padding after the last real one, but two of them at least.

    Padding is there for a fixed shape between the sampler and the step; nothing in the graph needs
    it. Python then does not know the size of the batch, and the model cannot depend on it there.
    """
    present = examples.present
    capacity = tf.shape(present)[0]
    last = tf.reduce_max(tf.where(present > 0, tf.range(1, capacity + 1), 0))
    return examples.part(0, tf.minimum(tf.maximum(last, 2), capacity))
