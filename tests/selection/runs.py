"""One selection in many independent runs, in a graph or compiled by XLA."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.core import xla


def rows_of_runs(
    select: Callable[[noise.Draw], tf.Tensor],
    runs: int,
    compiled: bool,
    keep: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
) -> np.ndarray:
    """What `keep` makes of the rows of each run, `[runs, ...]`; each run has a draw of its own."""
    key = noise.NoiseKey()

    @tf.function
    def run(_: tf.Tensor) -> tf.Tensor:
        draw = key.next_draw()
        rows = xla.compiled(lambda: select(draw)) if compiled else select(draw)
        return keep(rows)

    spec = tf.TensorSpec(None, tf.int64)
    return tf.map_fn(run, tf.zeros([runs]), fn_output_signature=spec).numpy()
