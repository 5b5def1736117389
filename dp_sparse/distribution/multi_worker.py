"""Training under a strategy of several workers, whose processes all run the same script.

Keras' `fit` fails under `MultiWorkerMirroredStrategy` (keras#20585). Here every worker draws the
same batches from one shared key, reads its own examples of them, and runs the private step under
`strategy.run`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.core import key_bytes
from dp_sparse.distribution import epochs as epochs_of
from dp_sparse.distribution.epochs import checked_optimizer
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Augment, BatchPart, augmented, batch_of, new_nonce
from dp_sparse.step import build_for, preflight


def train(
    model: keras.Model,
    source: Any,
    *,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    class_weight: dict[int, float] | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: int = 0,
) -> keras.callbacks.History:
    """Trains a model that was built and compiled inside `strategy.scope()`, on every worker.

    Args:
        model: Compiled with a private optimizer.
        source: What `plan.sampling.batches` takes, the same on every worker, in the same order.
        epochs: Into which the steps are divided, for metrics and callbacks. With a window of the
            optimizer, one call for all of them is best: its maps are lost at its end, and a call
            whose steps end no window warns.
        steps_per_epoch: By default as `fit` has it: what is left of the plan, divided by `epochs`;
            if the plan was made in epochs and has more of them left, those of one.
        class_weight: As `PoissonSampling.batches` takes it.
        augment: As `PoissonSampling.batches` takes it; each worker draws seeds of its own.
        callbacks: They run on every worker: let one alone write files.
        verbose: As in Keras.

    Returns:
        The history of the metrics, over the examples of all workers.

    Raises:
        ValueError: More steps than the plan has left.
        PrivacyError: A model without a private optimizer, one that delays noise, or anything that
            `fit` refuses.

    Examples:
        Each worker runs the same script; one process without a strategy is a worker, too:

        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> ids, table = keras.Input((), dtype="int32"), keras.layers.Embedding(10, 2)
        >>> model = keras.Sequential([ids, table, keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> history = dp_sparse.distribution.train(model, (np.arange(8), np.ones(8)))
        >>> int(model.optimizer.steps_spent), list(history.history)
        (2, ['loss'])

    ### Formal Guarantees
    Those of the plan, if nobody but the workers sees their memory and what they send each other:
    clipped sums without noise, ids, and the keys of noise and sampling, in the clear. Every worker
    must be given the same `source`, or the batches are of no sampler.
    """
    checked_optimizer(model)
    model.make_train_function()  # refuses what fit would

    def begin(first_step: int) -> tuple[epochs_of.Step, epochs_of.Logs]:
        model.train_step.preflight.restart()  # its steps are traced anew
        iterator = iter(_batches(model, source, first_step, class_weight, augment))
        step = _step_function(model)
        return lambda: step(next(iterator)), lambda: {
            name: float(value) for name, value in model.get_metrics_result().items()
        }

    return epochs_of.run(model, source, begin, epochs, steps_per_epoch, callbacks, verbose)


def _step_function(model: keras.Model) -> Callable[[Any], None]:
    @tf.function(autograph=False, reduce_retracing=True)
    def step(batch: Any) -> None:
        model.distribute_strategy.run(model.train_step, args=(batch,))

    def looked_at(batch: Any) -> None:
        preflight(model, batch)
        step(batch)

    return looked_at


def _batches(
    model: keras.Model,
    source: Any,
    first_step: int,
    class_weight: dict[int, float] | None,
    augment: Augment | None,
) -> Any:
    """The batches of all workers, each replica's own part of them; builds the model for them."""
    strategy, sampling = model.distribute_strategy, model.optimizer.plan.sampling
    replicas = strategy.num_replicas_in_sync
    size = math.ceil(sampling.batch_capacity / replicas)  # of a replica
    own = len(strategy.extended.worker_devices) if replicas > 1 else 1
    key, nonce = _shared_secrets(strategy, model.optimizer)

    def between(begin: int, end: int) -> tf.data.Dataset:
        begin, end = (min(place, sampling.batch_capacity) for place in (begin, end))
        part = BatchPart(begin, end, key, nonce)
        batches = sampling.batches_of(
            source, part, first_step=first_step, class_weight=class_weight
        )
        seed = sampling.not_private_seed
        return augmented(batches, augment, key_bytes(seed, f"augmentation {begin}", first_step))

    spec = batch_of(between(0, own * size).element_spec)
    build_for(model, model.optimizer, spec.examples)

    def of_replicas(*batch: Any) -> tf.data.Dataset:
        def part(index: tf.Tensor) -> Any:
            return tf.nest.map_structure(
                lambda leaf: leaf[index * size : (index + 1) * size], tuple(batch)
            )

        return tf.data.Dataset.range(own).map(part)

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        first = context.input_pipeline_id * own * size
        batches = between(first, first + own * size)
        return batches.flat_map(of_replicas) if own > 1 else batches

    return strategy.distribute_datasets_from_function(of_worker)


def _shared_secrets(
    strategy: tf.distribute.Strategy, optimizer: PrivateOptimizer
) -> tuple[int, int]:
    """The sampling key and nonce of all workers; the optimizer takes over their noise key."""

    @tf.function(autograph=False)
    def shared(words: tf.Tensor, nonce: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def of_replica(words: tf.Tensor, nonce: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            context = tf.distribute.get_replica_context()
            first = tf.equal(context.replica_id_in_sync_group, 0)
            return tf.where(first, words, tf.zeros_like(words)), nonce

        of_first, nonces = strategy.run(of_replica, args=(words, nonce))
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, of_first, axis=None)
        return total, tf.reduce_max(strategy.gather(nonces, axis=0))

    seed, steps = optimizer.plan.sampling.not_private_seed, int(optimizer.steps_spent.numpy())
    own = np.frombuffer(key_bytes(seed, "workers", steps)(32), np.int64)
    words, nonce = shared(tf.constant(own), tf.constant([new_nonce(None)], tf.int64))
    optimizer.use_noise_key(words[:2])
    return int.from_bytes(words[2:].numpy().tobytes(), "little"), int(nonce)
