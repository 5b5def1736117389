"""Whether this machine's TensorFlow computes what clipping rests on."""

import numpy as np
import tensorflow as tf

from dp_sparse.clipping.uses import Product
from dp_sparse.core import xla


def self_check(compiled: bool = False) -> None:
    """Compares `uses.Product` with NumPy on odd shapes.

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
        use = Product(tf.constant(x), tf.constant(dz))
        if positions == 1:
            use = Product(use.inputs[:, 0], use.cotangents[:, 0])
        found = _norms_and_sum(use, tf.constant(factors), compiled)
        for right, value in zip(expected, found, strict=True):
            if not np.allclose(value, right, rtol=1e-3, atol=1e-3):
                raise RuntimeError(
                    "This machine's TensorFlow multiplies matrices wrongly "
                    f"({positions} x {width_in} x {width_out}): set TF_ENABLE_ONEDNN_OPTS=0."
                )


def _norms_and_sum(use: Product, factors: tf.Tensor, compiled: bool) -> tuple[tf.Tensor, tf.Tensor]:
    def both() -> tuple[tf.Tensor, tf.Tensor]:
        return use.squared_norms(), use.clipped_sum(factors)

    return tf.function(lambda: xla.compiled(both))() if compiled else both()
