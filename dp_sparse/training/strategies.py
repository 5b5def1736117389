"""The `tf.distribute` strategies under which a private step may run, and what they require."""

from typing import Any

import keras
import tensorflow as tf

from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import is_sampled

_SUPPORTED = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
)

# What Keras does before the gradients of the replicas are summed, or on each replica by itself.
_NOT_SHARED = ("clipnorm", "global_clipnorm", "clipvalue", "ema_overwrite_frequency")


def check(strategy: tf.distribute.Strategy | None, optimizer: PrivateOptimizer) -> None:
    """Raises PrivacyError unless the model, its strategy and its optimizer fit together."""
    _refuse_others(strategy)
    for part in (optimizer, optimizer.optimizer):
        own = part._distribution_strategy
        if own is not (strategy or own) or (strategy is None and own.num_replicas_in_sync > 1):
            raise PrivacyError(
                f"Expected the model, {type(optimizer).__name__} and the optimizer that it wraps "
                f"under one tf.distribute strategy, got {type(part).__name__} made under "
                f"{type(own).__name__}: make all three inside strategy.scope()."
            )
    if strategy is not None and not optimizer.replicable:
        raise PrivacyError(
            f"Expected no tf.distribute strategy with {type(optimizer).__name__}, got "
            f"{type(strategy).__name__}: rows must get their noise on all replicas before one of "
            "them reads them. Use DPSGDOptimizer, or train on one device."
        )
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        for name in _NOT_SHARED:
            if getattr(optimizer.optimizer, name, None):
                raise ValueError(
                    f"Expected an optimizer without {name} on several replicas, got {name}="
                    f"{getattr(optimizer.optimizer, name)}: Keras does it before the gradients of "
                    "the replicas are summed. Leave it out."
                )


def check_fit(model: keras.Model) -> None:
    """Refuses `fit` where it would not run the private step."""
    if tf.distribute.has_strategy() and model._distribute_strategy is None:
        raise PrivacyError(
            "Expected fit outside strategy.scope(), got it inside: build and compile the model "
            "inside to train on several replicas, and call fit outside."
        )
    if isinstance(model._distribute_strategy, tf.distribute.TPUStrategy):
        raise PrivacyError(
            "Expected no fit under TPUStrategy, where checks inside the step are dropped: call "
            "dp_sparse.distribution.train_tables."
        )
    if model.optimizer.outside_tables:
        raise PrivacyError(
            "Expected dp_sparse.distribution.train_tables, got fit, with an optimizer of "
            "PrivateTables: fit trains no table of an embedding layer."
        )


def check_shared_out(model: keras.Model, dataset: Any) -> None:
    """Refuses private batches that `fit` cannot divide among replicas; ignores other data."""
    if not is_sampled(dataset.element_spec):
        return
    if isinstance(model._distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise PrivacyError(
            "Expected MirroredStrategy, got MultiWorkerMirroredStrategy, where Keras' fit "
            "fails: call dp_sparse.distribution.train(model, source) on every worker."
        )
    if isinstance(dataset, tf.distribute.DistributedDataset):
        raise PrivacyError(
            "Expected the sampler's own batches, got a distributed dataset: pass "
            "plan.sampling.batches(dataset) to fit, which divides them among replicas."
        )


def _refuse_others(strategy: tf.distribute.Strategy | None) -> None:
    """Refuses strategies whose workers do not do each step together.

    Raises:
        PrivacyError: Any but `OneDeviceStrategy`, `MirroredStrategy`,
            `MultiWorkerMirroredStrategy` and, for `train_tables`, `TPUStrategy`.
    """
    if strategy is None or isinstance(strategy, _SUPPORTED):
        return
    name = type(strategy).__name__
    if name.startswith("ParameterServer"):
        raise PrivacyError(
            f"Expected a synchronous strategy, got {name}: each of its workers updates on its own, "
            "without the whole batch and without common noise, and what one worker releases enters "
            "the gradients of another, so the plan's accounting would not hold. Use "
            "MirroredStrategy or MultiWorkerMirroredStrategy."
        )
    raise PrivacyError(
        f"Expected MirroredStrategy, MultiWorkerMirroredStrategy or TPUStrategy, got {name}, which "
        "was not tested. Use one of those, or no strategy."
    )
