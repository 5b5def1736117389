"""Which `tf.distribute` strategies a private step may run under, and what must fit them."""

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

# What Keras does before the replicas' gradients meet, or where they cannot.
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
                    f"{getattr(optimizer.optimizer, name)}: Keras does it before replicas meet, "
                    "or where they cannot. Leave it out."
                )


def check_fit(model: keras.Model) -> None:
    """Refuses `fit` where it would go another way than the private step."""
    if tf.distribute.has_strategy() and model._distribute_strategy is None:
        raise PrivacyError(
            "Expected fit outside strategy.scope(): build and compile the model inside, if it "
            "shall train on several replicas."
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
    """Refuses what `fit` cannot share out; other data, as of `evaluate`, is Keras' business."""
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
            "plan.sampling.batches(dataset) to fit, which shares them out."
        )


def _refuse_others(strategy: tf.distribute.Strategy | None) -> None:
    """Refuses strategies under which a step is not one step.

    Raises:
        PrivacyError: Any but `OneDeviceStrategy`, `MirroredStrategy`,
            `MultiWorkerMirroredStrategy` and, for `train_tables`, `TPUStrategy`.
    """
    if strategy is None or isinstance(strategy, _SUPPORTED):
        return
    name = type(strategy).__name__
    if name.startswith("ParameterServer"):
        raise PrivacyError(
            f"Expected a synchronous strategy, got {name}: its workers update on their own, so no "
            "batch is whole, no noise is drawn once, and what one worker releases enters the "
            "gradients of another: the plan's accounting would not hold. Use MirroredStrategy or "
            "MultiWorkerMirroredStrategy."
        )
    raise PrivacyError(
        f"Expected MirroredStrategy, MultiWorkerMirroredStrategy or TPUStrategy, got {name}, for "
        "which nothing here was shown to hold. Use one of those, or no strategy."
    )
