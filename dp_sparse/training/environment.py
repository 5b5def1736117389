"""Settings of the whole process under which a private step would not be what it says.

TensorFlow's graph optimizer can be told to drop assertions, which are the step's checks, or to
round float32 to fewer bits, on which the clip norm rests. Nothing of a model shows it, so each run
asks beforehand, and again whenever the settings changed.
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import clipping, noise
from dp_sparse.core import PrivacyError

_HARMFUL = ("debug_stripper", "auto_mixed_precision")  # the beginnings of their names
_ENTRY = 1 + 2.0**-12  # to fewer bits this is 1
_SIZE = 64  # smaller products are left alone


def check(compiled: bool) -> None:
    """Checks the process once, and anew when the graph optimizer's options changed.

    Args:
        compiled: Whether XLA compiles the step.

    Raises:
        PrivacyError: TensorFlow drops assertions, runs functions eagerly, or float32 has not its
            own bits.
        ValueError: Keras' default float is not float32.
        RuntimeError: This machine's TensorFlow computes noise or products wrongly.

    Costs some 10 µs, the first time a second.
    """
    if tf.config.functions_run_eagerly():
        raise PrivacyError(
            "Expected functions to be traced, since the graph guard reads their graphs, got "
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
                f"Expected {name} off, got it on, under which the step loses its checks or its "
                "float32: call tf.config.optimizer.set_experimental_options("
                f"{{{name!r}: False}})."
            )
    if not _assertions_hold():
        raise PrivacyError(
            "Expected TensorFlow to keep assertions, got a graph optimizer that drops them, and "
            "with them the checks of a step: turn off what changes graphs "
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
    @tf.function(autograph=False)
    def asserting(condition: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(condition, ["refused"])]):
            return tf.constant(True)

    try:
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
