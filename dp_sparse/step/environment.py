"""Process settings under which a private step would not be private.

TensorFlow's graph optimizer can be set to drop assertions, which are the step's checks, or to round
float32 to fewer bits, so that no clip norm holds. A model does not show this, so each run checks
the settings before it begins, and again when they have changed.

Where products of this machine let NaN through to other examples, no example may hold any. The
module also knows under which `tf.distribute` strategies a private step may run.
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.core import BadExampleError, PrivacyError, require, stderr_without
from dp_sparse.optimizers import PrivateOptimizer
from dp_sparse.sampling import Examples, is_sampled

_HARMFUL = ("debug_stripper", "auto_mixed_precision")  # beginnings of the names of options
_ON_PURPOSE = "fails_on_purpose"  # an assertion, by name
_ENTRY = 1 + 2.0**-12  # rounded to fewer bits, this is 1
_SIZE = 64  # products of smaller matrices are not changed
_NOT_FINITE = (
    "Expected finite inputs and labels under bfloat16 on this machine, got NaN or infinity in {} "
    "examples: its products (oneDNN) would pass it on to other examples.\n"
    "Replace these values, set TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported, or train in "
    "float32."
)
_SUPPORTED = (
    tf.distribute.OneDeviceStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
)
# What Keras does before the gradients of the replicas are summed, or on each replica by itself.
_NOT_SHARED = ("clipnorm", "global_clipnorm", "clipvalue", "ema_overwrite_frequency")


def check(compiled: bool) -> None:
    """Checks the process once, and again when the graph optimizer's options have changed.

    Args:
        compiled: Whether XLA compiles the step.

    Raises:
        PrivacyError: TensorFlow drops assertions, runs functions eagerly, or rounds float32 to
            fewer bits.
        ValueError: Keras' default float is not float32.
        RuntimeError: This machine's TensorFlow computes noise or products wrongly.

    It costs about 10 µs, and about a second the first time.
    """
    if tf.config.functions_run_eagerly():
        raise PrivacyError(
            "Expected traced functions, since the graph guard checks their graphs, got "
            "tf.config.run_functions_eagerly(True): set it to False."
        )
    tf.config.experimental.enable_tensor_float_32_execution(False)
    options = tf.config.optimizer.get_experimental_options()
    _check_once(tuple(sorted(options.items())), keras.config.floatx(), compiled)


@functools.cache
def _check_once(options: tuple[tuple[str, Any], ...], floatx: str, compiled: bool) -> None:
    if floatx != "float32":
        raise ValueError(
            f"Expected keras.config.floatx() to be float32, got {floatx}: losses and gradients "
            'are float32. Call keras.config.set_floatx("float32").'
        )
    for name, on in options:
        if on and name.startswith(_HARMFUL):
            raise PrivacyError(
                f"Expected {name} off, got it on, which removes checks from the step or rounds "
                "float32 to fewer bits: call tf.config.optimizer.set_experimental_options("
                f"{{{name!r}: False}})."
            )
    if not _assertions_hold():
        raise PrivacyError(
            "Expected TensorFlow to keep assertions, got a graph optimizer that drops them, which "
            "are the checks of a step: turn off what changes graphs "
            "(tf.config.optimizer.set_experimental_options)."
        )
    if _rounding() > 2.0**-18:
        raise PrivacyError(
            "Expected float32 products, got some rounded to fewer bits, under which no clip norm "
            "holds: turn off mixed precision of graphs and devices."
        )
    noise.self_check()
    clipping.self_check(compiled)


def _assertions_hold() -> bool:
    """Whether one that must fail does, of which TensorFlow's log would look like a broken run."""

    @tf.function(autograph=False)
    def asserting(condition: tf.Tensor) -> tf.Tensor:
        check = tf.debugging.Assert(condition, [_ON_PURPOSE], name=_ON_PURPOSE)
        with tf.control_dependencies([check]):
            return tf.constant(True)

    try:
        with stderr_without(_ON_PURPOSE):
            asserting(tf.constant(False))
    except tf.errors.InvalidArgumentError:
        return True
    return False


def _rounding() -> float:
    """The relative error of a product in a graph."""

    @tf.function(autograph=False)
    def product(factor: tf.Tensor) -> tf.Tensor:
        return tf.matmul(factor, factor, transpose_b=True)

    found = tf.cast(product(tf.fill([_SIZE, _SIZE], _ENTRY)), tf.float64)
    return float(tf.reduce_max(tf.abs(found / (_SIZE * _ENTRY**2) - 1)))


def refuse_nan(model: keras.Model, examples: Examples) -> Examples:
    """The examples, which the step takes once all floats of those that are there are finite.

    Raises:
        BadExampleError: At run time, where one is not and the model computes in bfloat16 on a
            machine whose products read behind a row.
    """
    if not clipping.lets_nan_through(model):
        return examples
    present = examples.present > 0
    lost = tf.zeros_like(present)
    for leaf in tf.nest.flatten((examples.x, examples.y)):
        if leaf.dtype.is_floating:
            flat = tf.reshape(leaf, [tf.shape(leaf)[0], -1])
            lost |= present & tf.reduce_any(~tf.math.is_finite(flat), axis=1)
    count = tf.math.count_nonzero(lost, dtype=tf.int32)
    with tf.control_dependencies([require(count < 1, BadExampleError, _NOT_FINITE, count)]):
        return tf.nest.map_structure(tf.identity, examples)


def check_strategy(strategy: tf.distribute.Strategy | None, optimizer: PrivateOptimizer) -> None:
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


def check_fit_strategy(model: keras.Model) -> None:
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
