"""Whether this machine's TensorFlow computes what clipping rests on."""

import functools

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.clipping.gradient_terms import Product
from dp_sparse.core import xla


def self_check(compiled: bool = False) -> None:
    """Compares `gradient_terms.Product` with NumPy on odd shapes.

    oneDNN has computed some matrix products silently wrongly on TensorFlow 2.19 to 2.21.

    Args:
        compiled: Whether XLA shall compute them.

    Raises:
        RuntimeError: This machine's TensorFlow computes them wrongly.
    """
    rng = np.random.default_rng(0)
    factors = rng.random(5).astype(np.float32)
    for positions, width_in, width_out in ((1, 7, 3), (4, 33, 65), (9, 2, 5)):
        x = rng.normal(size=(5, positions, width_in)).astype(np.float32)
        dz = rng.normal(size=(5, positions, width_out)).astype(np.float32)
        gradients = np.einsum("bsd,bsn->bdn", x, dz)
        expected = (gradients**2).sum((1, 2)), np.tensordot(factors, gradients, 1)
        term = Product(tf.constant(x), tf.constant(dz))
        if positions == 1:
            term = Product(term.inputs[:, 0], term.cotangents[:, 0])
        found = _norms_and_sum(term, tf.constant(factors), compiled)
        for right, value in zip(expected, found, strict=True):
            if not np.allclose(value, right, rtol=1e-3, atol=1e-3):
                raise RuntimeError(
                    "This machine's TensorFlow multiplies matrices wrongly "
                    f"({positions} x {width_in} x {width_out}): set TF_ENABLE_ONEDNN_OPTS=0."
                )


def lets_nan_through(model: keras.Model) -> bool:
    """Whether NaN of one example may reach others in this model's products, on this machine.

    oneDNN's bfloat16 products of an odd width read one number behind each row, which is the next
    example's, and multiply it by 0. That changes nothing unless it is NaN or infinite.
    """
    computes = {layer.compute_dtype for layer in model._flatten_layers()}
    return "bfloat16" in computes and _bfloat16_reads_behind_a_row()


@functools.cache
def _bfloat16_reads_behind_a_row() -> bool:
    size, width = 64, 33

    @tf.function(autograph=False)
    def product(x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, tf.ones([width, 16], x.dtype))

    with tf.init_scope():
        rows = np.zeros([size, width], np.float32)
        rows[size // 2] = np.nan
        found = product(tf.constant(rows, tf.bfloat16))
        return bool(tf.math.count_nonzero(tf.math.is_nan(found)) > 16)


def _norms_and_sum(
    term: Product, factors: tf.Tensor, compiled: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    def both() -> tuple[tf.Tensor, tf.Tensor]:
        return term.squared_norms(), term.clipped_sum(factors)

    return tf.function(lambda: xla.compiled(both))() if compiled else both()
