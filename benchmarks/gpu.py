"""Compares training steps on a GPU with the same steps on a CPU, and times them.

`python -m benchmarks.gpu` prints one JSON line to send along, and needs some 8 GB for its largest
table; `--most_rows 1e7` needs 1 GB. Without a GPU it compares the CPU with itself. Four sparse
optimizers, in graph mode and compiled by XLA, take two steps with known noise (a debug plan) on the
device and on the CPU; their largest difference is that of the tables. Then DP-AdaFEST steps on
tables of 1e5 to 1e8 rows of width 8. Operations of its step that have no GPU kernel in this
TensorFlow are named: they run on the host.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import kernels

import dp_sparse
from benchmarks import harness

WIDTH, BATCH, RATE = 8, 1024, 0.1
SIZES = {"1e5": 10**5, "1e6": 10**6, "1e7": 10**7, "1e8": 10**8}
ROWS, STEPS, SEED = 1000, 2, 7
ROUNDS, QUICK_ROUNDS, WARM_UP = 20, 5, 3

Make = Callable[[dp_sparse.PrivacyPlan], keras.optimizers.Optimizer]


def optimizers() -> dict[str, Make]:
    """The optimizers that choose rows, around SGD."""
    rows = dp_sparse.SelectedRows.public({"table": np.arange(0, ROWS, 2)}, {"table": ROWS})

    def adafest(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
        return dp_sparse.DPAdaFESTOptimizer(_sgd(), plan, clip_norm=1.0)

    def plus(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
        return dp_sparse.DPAdaFESTOptimizer(_sgd(), plan, clip_norm=1.0, rows=rows)

    def fest(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
        return dp_sparse.DPFESTOptimizer(_sgd(), plan, clip_norm=1.0, rows=rows)

    def exponential(plan: dp_sparse.PrivacyPlan) -> keras.optimizers.Optimizer:
        return dp_sparse.ExponentialSelectionOptimizer(_sgd(), plan, clip_norm=1.0)

    return {"adafest": adafest, "adafest_plus": plus, "fest": fest, "exponential": exponential}


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(RATE)


def main() -> None:
    """Prints what was found."""
    parser = harness.parser(__doc__ or "")
    there = bool(tf.config.list_physical_devices("GPU"))
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu" if there else "cpu")
    parser.add_argument("--most_rows", type=float, default=1e8, help="of the largest table")
    options = parser.parse_args()
    if options.most_rows < min(SIZES.values()):
        parser.error(f"expected --most_rows >= 1e5, got {options.most_rows:g}")
    if options.device == "gpu" and not there:
        parser.error("TensorFlow sees no GPU: leave --device out to run without one")
    device = f"{options.device.upper()}:0"
    rows, metrics = differences(device)
    on_host = operations_without_kernel()
    rows += [(f"no GPU kernel: {name}", "", "") for name in on_host]
    metrics["operations_without_gpu_kernel"] = float(len(on_host))
    found, own = times(device, options)
    harness.report("gpu", ("what", "value", ""), [*rows, *found], {**metrics, **own}, options)


def differences(device: str) -> tuple[list[tuple[object, ...]], dict[str, float]]:
    """The largest difference between a device and the CPU, by optimizer and mode."""
    rows: list[tuple[object, ...]] = []
    largest = 0.0
    for (name, make), compiled in itertools.product(optimizers().items(), (False, True)):
        tables = [trained(make, name, where, compiled) for where in ("CPU:0", device)]
        apart = float(np.max(np.abs(tables[0] - tables[1])))
        mode = "XLA" if compiled else "graph"
        rows.append((f"{name}, {mode}: largest difference from the CPU", apart, ""))
        largest = max(largest, apart)
        harness.forget()
    return rows, {"largest_difference": largest}


def trained(make: Make, name: str, device: str, compiled: bool) -> np.ndarray:
    """The table after some steps with known noise."""
    with tf.device(device):
        model, batches = _model(make, name, ROWS, STEPS, compiled, seed=SEED)
        for batch in batches:
            model.train_function(iter([batch]))
        return np.asarray(model.get_layer("table").embeddings)


def _model(
    make: Make, name: str, rows: int, steps: int, compiled: bool, seed: int | None = None
) -> tuple[keras.Model, Iterator[object]]:
    sampling = dp_sparse.StreamSampling(num_examples=BATCH * steps, batch_size=BATCH)
    mechanism = (
        dp_sparse.ExponentialSelection(rows_per_step=50)
        if name == "exponential"
        else dp_sparse.GaussianMechanism()
    )
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-6), sampling, mechanism)
    plan = plan.calibrate()
    if seed is not None:
        plan = dp_sparse.not_private_plan(plan, seed)
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, (BATCH * steps, 1)) - 1, rows - 1).astype(np.int64)
    source = tf.data.Dataset.from_tensor_slices((ids, rng.normal(size=len(ids)).astype("float32")))
    inputs = keras.Input((1,), dtype="int64")
    table = keras.layers.Embedding(rows, WIDTH, embeddings_initializer="zeros", name="table")
    model = keras.Model(inputs, keras.ops.sum(table(inputs), axis=2))
    model.compile(optimizer=make(plan), loss="mse", jit_compile=compiled)
    model.make_train_function()
    return model, iter(list(plan.sampling.batches(source)))


def operations_without_kernel() -> list[str]:
    """Operations of a DP-AdaFEST step, with their dtype, that no kernel of a GPU computes."""
    model, batches = _model(optimizers()["adafest"], "adafest", ROWS, 1, compiled=False)
    batch = next(batches)
    dp_sparse.preflight(model, batch)
    step = tf.function(model.train_step, autograph=False).get_concrete_function(batch)
    graph = step.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return sorted({_named(node) for node in nodes if not _has_kernel(node)})


def _named(node: tf.compat.v1.NodeDef) -> str:
    of = next((name for name in ("T", "dtype", "Tparams") if node.attr[name].type), None)
    return node.op if of is None else f"{node.op} of {tf.as_dtype(node.attr[of].type).name}"


def _has_kernel(node: tf.compat.v1.NodeDef) -> bool:
    own = list(kernels.get_registered_kernels_for_op(node.op).kernel)
    if not own:
        return True  # a call of a function
    return any(k.device_type in ("GPU", "DEFAULT") and _takes(k, node) for k in own)


def _takes(kernel: object, node: tf.compat.v1.NodeDef) -> bool:
    constraints = kernel.constraint  # type: ignore[attr-defined]
    return all(node.attr[c.name].type in c.allowed_values.list.type for c in constraints)


def times(
    device: str, options: argparse.Namespace
) -> tuple[list[tuple[object, ...]], dict[str, float]]:
    """Milliseconds a step on tables of growing size, in turns."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    most = min(options.most_rows, 1e5) if options.quick else options.most_rows
    make, seconds = optimizers()["adafest"], {}
    for name, size in SIZES.items():
        if size > most:
            continue
        with tf.device(device):  # of one size at a time: tables are large
            steps = {
                f"{name}_{mode}": _step(make, size, rounds + WARM_UP, mode == "xla", device)
                for mode in ("graph", "xla")
            }
            seconds |= harness.in_turns(steps, rounds, WARM_UP)
        del steps
        harness.forget()
    rows = [(f"ms a step, {name} rows", 1000 * s, "") for name, s in seconds.items()]
    return rows, {f"ms_{name}": 1000 * s for name, s in seconds.items()}


def _step(make: Make, size: int, steps: int, compiled: bool, device: str) -> Callable[[], object]:
    model, batches = _model(make, "adafest", size, steps, compiled)

    def run() -> object:
        with tf.device(device):
            return model.train_function(iter([next(batches)]))

    return run


if __name__ == "__main__":
    main()
