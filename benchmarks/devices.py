"""XLA and replicas: what compiling a step costs or saves, and what several replicas cost.

The pCTR step of `benchmarks.pctr_step` in graph mode and compiled by XLA; the step of one table of
1e5 to 1e7 rows compiled; and two replicas on two logical CPU devices, batches of half the size
each, against stock Keras under the same strategy.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

import dp_sparse
from benchmarks import harness, one_table, pctr_step

ROUNDS, QUICK_ROUNDS = 30, 12
REPLICAS = 2
PCTR_ROWS = 10**5
TABLE_ROWS = {"1e5": 10**5, "1e7": 10**7}


def strategy() -> tf.distribute.Strategy:
    """Two logical devices of one CPU."""
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])


def main() -> None:
    """Prints ms per step and the ratios."""
    options = harness.arguments(__doc__ or "")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * REPLICAS,
    )
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    rows: list[tuple[object, ...]] = []
    metrics: dict[str, float] = {}
    for measure in (_compiled_pctr, _compiled_table, _replicas):
        found, own = measure(rounds)
        rows += found
        metrics |= own
        harness.forget()
    harness.report("devices", ("step", "ms", "ratio"), rows, metrics, options)


Measured = tuple[list[tuple[object, ...]], dict[str, float]]


def _compiled_pctr(rounds: int) -> Measured:
    sizes = pctr_step.vocabularies(PCTR_ROWS)
    batches = rounds + pctr_step.WARM_UP
    seconds = harness.in_turns(
        {
            "graph": pctr_step.private_step(sizes, batches, "zeros"),
            "xla": pctr_step.private_step(sizes, batches, "zeros", jit_compile=True),
        },
        rounds,
        pctr_step.WARM_UP,
    )
    ratio = seconds["xla"] / seconds["graph"]
    rows = [
        ("pctr, graph mode", 1000 * seconds["graph"], 1.0),
        ("pctr, XLA", 1000 * seconds["xla"], ratio),
    ]
    return rows, {"xla_over_graph_pctr": ratio}


def _compiled_table(rounds: int) -> Measured:
    batches = rounds + pctr_step.WARM_UP
    steps = {name: _one_table(size, batches) for name, size in TABLE_ROWS.items()}
    seconds = harness.in_turns(steps, rounds, pctr_step.WARM_UP)
    ratio = seconds["1e7"] / seconds["1e5"]
    rows = [
        (f"one table of {name} rows, XLA", 1000 * s, s / seconds["1e5"])
        for name, s in seconds.items()
    ]
    return rows, {"xla_flatness_1e7_over_1e5": ratio}


def _one_table(vocabulary: int, batches: int) -> Callable[[], object]:
    def optimizer(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
        sgd = keras.optimizers.SGD(one_table.RATE)
        return dp_sparse.DPAdaFESTOptimizer(sgd, plan, clip_norm=1.0)

    return one_table.private_step(vocabulary, batches, optimizer, jit_compile=True)


def _replicas(rounds: int) -> Measured:
    sizes = pctr_step.vocabularies(PCTR_ROWS)
    batches = rounds + pctr_step.WARM_UP
    under = strategy()
    with under.scope():
        candidates = {
            "stock, 2 replicas": pctr_step.stock_step(sizes, 3, "zeros", under),
            "private, 2 replicas": pctr_step.private_step(sizes, batches, "zeros", strategy=under),
        }
    candidates["stock"] = pctr_step.stock_step(sizes, 3, "zeros")
    candidates["private"] = pctr_step.private_step(sizes, batches, "zeros")
    seconds = harness.in_turns(candidates, rounds, pctr_step.WARM_UP)
    overhead = seconds["private, 2 replicas"] / seconds["stock, 2 replicas"]
    rows = [(f"pctr, {n}", 1000 * s, s / seconds["stock"]) for n, s in seconds.items()]
    return rows, {"replica_overhead": overhead}


if __name__ == "__main__":
    main()
