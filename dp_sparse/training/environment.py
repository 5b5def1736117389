"""Process settings under which a private step would not be private.

TensorFlow's graph optimizer can be set to drop assertions, which are the step's checks, or to round
float32 to fewer bits, so that no clip norm holds. A model does not show this, so each run checks
the settings before it begins, and again when they have changed.
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.core import PrivacyError, stderr_without

_HARMFUL = ("debug_stripper", "auto_mixed_precision")  # beginnings of the names of options
_ON_PURPOSE = "fails_on_purpose"  # an assertion, by name
_ENTRY = 1 + 2.0**-12  # rounded to fewer bits, this is 1
_SIZE = 64  # products of smaller matrices are not changed


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
