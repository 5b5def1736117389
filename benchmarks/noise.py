"""What one Gaussian noise value costs, for 598 x 598 dense parameters, on this machine.

Compared are the noise of the training step (float64 inverse CDF fused by XLA, added to a sum), the
same noise for a changing number of rows (not fused), half the sum of four of TensorFlow's normals,
and one of TensorFlow's normals. The last has tails that end at 5.68 σ, so no private step may use
it.
"""

import tensorflow as tf

from benchmarks import harness
from dp_sparse import noise

SIDE = 598


def main() -> None:
    """Prints ns per value of each way to draw noise."""
    options = harness.arguments(__doc__ or "")
    rounds = 40 if options.quick else 400
    key, total = noise.NoiseKey(), tf.zeros([SIDE, SIDE])
    calls = tf.Variable(0, trainable=False)

    @tf.function
    def fused() -> tf.Tensor:
        return noise.noisy_mean(total, 1.0, 1.0, key.next_draw(), noise.Purpose.DENSE)

    @tf.function
    def rows() -> tf.Tensor:
        return noise.normal(key.next_draw(), noise.Purpose.ROWS, tf.size(total))

    @tf.function
    def four_normals() -> tf.Tensor:
        seed = tf.stack([calls.assign_add(1), 0])
        return 0.5 * tf.reduce_sum(tf.random.stateless_normal([4, SIDE, SIDE], seed), 0)

    @tf.function
    def one_normal() -> tf.Tensor:
        return tf.random.stateless_normal([SIDE, SIDE], tf.stack([calls.assign_add(1), 1]))

    candidates = {
        "inverse CDF, fused": fused,
        "inverse CDF, rows": rows,
        "four TensorFlow normals": four_normals,
        "one TensorFlow normal": one_normal,
    }
    seconds = harness.in_turns(candidates, rounds)
    ns = {name: 1e9 * value / SIDE**2 for name, value in seconds.items()}
    metrics = {
        "four_normals_over_fused": ns["four TensorFlow normals"] / ns["inverse CDF, fused"],
        "fused_over_one_normal": ns["inverse CDF, fused"] / ns["one TensorFlow normal"],
    }
    harness.report("noise", ("noise", "ns per value"), list(ns.items()), metrics, options)


if __name__ == "__main__":
    main()
