"""One embedding table of growing vocabulary (Ghazi et al., NeurIPS 2023, Table 4).

d = 64, batch 1,024, one id an example, SGD.

Four steps on equal batches: DP-AdaFEST through Keras, stock Keras without privacy, the leanest
non-private step (gather, gradient, scatter, in one graph), and DP-SGD with dense noise of the same
quality, as fast as we could make it: one XLA kernel draws the noise and updates the table. The loss
is linear in the looked-up row, so almost nothing but the embedding is timed. On a table of 1,000
rows this is what a step costs before it has any work to do: Keras' part of it, and ours.
"""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness
from benchmarks.one_table import BATCH, RATE, WIDTH, examples, private_step, stock_step

SMALL = {"1e3": 10**3}
SIZES = {"1e5": 10**5, "2e5": 2 * 10**5, "1e6": 10**6, "2e6": 2 * 10**6, "5e6": 5 * 10**6}
SIZES |= {"1e7": 10**7}
PAPER = {"1e5": 3.045, "2e5": 5.376, "1e6": 20.746, "2e6": 40.515, "5e6": 94.34, "1e7": 176.76}


def adafest_step(vocabulary: int, batches: int) -> Callable[[], object]:
    """One call is one DP-AdaFEST step, with as many expected false rows whatever the vocabulary."""
    return private_step(
        vocabulary,
        batches,
        lambda plan: dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(RATE), plan, clip_norm=1.0),
    )


def non_private_step(vocabulary: int) -> Callable[[], object]:
    """The leanest step: gather the rows, take the gradient, scatter it back."""
    table = tf.Variable(tf.random.uniform([vocabulary, WIDTH], -0.05, 0.05))
    ids, targets = map(tf.constant, examples(vocabulary, BATCH))

    @tf.function
    def step() -> tf.Tensor:
        rows = tf.gather(table, ids[:, 0])
        error = tf.reduce_sum(rows, axis=1) - targets
        gradient = tf.repeat(2 * error[:, tf.newaxis] / BATCH, WIDTH, axis=1)
        table.scatter_sub(tf.IndexedSlices(RATE * gradient, ids[:, 0]))
        return tf.reduce_mean(tf.square(error))

    return step


def dpsgd_step(vocabulary: int) -> Callable[[], object]:
    """The fastest DP-SGD we know: float64 inverse-CDF noise on every entry.

    The noise is fused with the table's update.
    """
    table = tf.Variable(tf.random.uniform([vocabulary, WIDTH], -0.05, 0.05))
    ids, targets = map(tf.constant, examples(vocabulary, BATCH))
    state = tf.Variable([1, 0], dtype=tf.uint64)

    @tf.function(jit_compile=True)
    def add_noise() -> None:
        bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[vocabulary, WIDTH],
            key=tf.constant([7], tf.uint64),
            counter=state.read_value(),
            alg=1,
            dtype=tf.uint64,
        )
        signed = tf.bitwise.right_shift(tf.bitcast(bits, tf.int64), tf.constant(11, tf.int64))
        centred = (tf.cast(signed, tf.float64) + 0.5) * 2.0**-52
        noise = tf.cast(np.sqrt(2.0) * tf.math.erfinv(centred), tf.float32)
        table.assign_sub(RATE / BATCH * noise)

    @tf.function
    def step() -> tf.Tensor:
        rows = tf.gather(table, ids[:, 0])
        error = tf.reduce_sum(rows, axis=1) - targets
        norms = tf.abs(2 * error) * np.sqrt(WIDTH)
        factors = tf.minimum(1.0, 1 / tf.maximum(norms, 1e-12))
        gradient = tf.repeat((factors * 2 * error)[:, tf.newaxis] / BATCH, WIDTH, axis=1)
        add_noise()
        table.scatter_sub(tf.IndexedSlices(RATE * gradient, ids[:, 0]))
        state.assign_add(tf.constant([0, 1], tf.uint64))
        return tf.reduce_mean(tf.square(error))

    return step


def main() -> None:
    """Prints ms per step at each vocabulary and the ratios."""
    options = harness.arguments(__doc__ or "")
    rounds = 30 if options.quick else 200
    seconds: dict[str, dict[str, float]] = {}
    sizes = SMALL | SIZES
    for name, size in sizes.items():
        candidates = {
            "adafest": adafest_step(size, rounds + 5),
            "stock": stock_step(size),
            "non-private": non_private_step(size),
        }
        seconds[name] = harness.in_turns(candidates, rounds, warm_up=5)
        del candidates
        harness.forget()
        dense = harness.in_turns({"dp-sgd": dpsgd_step(size)}, 1 if options.quick else 3, warm_up=1)
        seconds[name] |= dense
        harness.forget()
    rows = [
        (
            sizes[name],
            *(1000 * s[k] for k in ("adafest", "stock", "non-private", "dp-sgd")),
            s["dp-sgd"] / s["adafest"],
            PAPER.get(name, "-"),
        )
        for name, s in seconds.items()
    ]
    metrics = {
        "flatness_1e7_over_1e5": seconds["1e7"]["adafest"] / seconds["1e5"]["adafest"],
        "dpsgd_over_adafest_1e7": seconds["1e7"]["dp-sgd"] / seconds["1e7"]["adafest"],
        "adafest_over_stock_1e7": seconds["1e7"]["adafest"] / seconds["1e7"]["stock"],
        "adafest_over_stock_1e3": seconds["1e3"]["adafest"] / seconds["1e3"]["stock"],
        "stock_over_nonprivate_1e3": seconds["1e3"]["stock"] / seconds["1e3"]["non-private"],
        "adafest_over_nonprivate_1e7": seconds["1e7"]["adafest"] / seconds["1e7"]["non-private"],
    }
    headers = (
        "vocabulary",
        "DP-AdaFEST ms",
        "stock Keras ms",
        "leanest ms",
        "DP-SGD ms",
        "DP-SGD / DP-AdaFEST",
        "paper",
    )
    harness.report("vocabulary_scaling", headers, rows, metrics, options)


if __name__ == "__main__":
    main()
