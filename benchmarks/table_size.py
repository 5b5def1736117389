"""A step and its memory as one table grows, beside tensorflow-privacy, as figures and a picture.

One table of width 64, batch 1,024, one id an example, SGD: stock Keras without privacy, DP-AdaFEST,
and DP-SGD of tensorflow-privacy, which makes the gradient of the table dense. Each has a process of
its own for each size, since memory is what a process had at most beyond what it had at first.
tensorflow-privacy runs where it is installed: `make .parity/installed`, then with
`TF_USE_LEGACY_KERAS=1 PYTHONPATH=$PWD/.parity`.
"""

import importlib.util
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness
from benchmarks.one_table import BATCH, RATE, WIDTH, examples, private_step, stock_step
from pipelines.own_process import in_own_process

SIZES = {"1e4": 10**4, "1e5": 10**5, "1e6": 10**6, "1e7": 10**7}
QUICK_SIZES = {"1e3": 10**3, "1e4": 10**4}
STEPS, QUICK_STEPS, WARM_UP = 12, 4, 2
STOCK, OURS, THEIRS = WAYS = ("Keras", "DP-AdaFEST", "tensorflow-privacy")
LABELS = {
    STOCK: "Keras, no privacy",
    OURS: "DP-AdaFEST, dp_sparse",
    THEIRS: "DP-SGD, tensorflow-privacy",
}


def step_of(way: str, rows: int, steps: int) -> Callable[[], object]:
    """One call is one step."""
    if way == STOCK:
        return stock_step(rows)
    if way == OURS:
        return private_step(
            rows,
            steps + WARM_UP,
            lambda plan: dp_sparse.DPAdaFESTOptimizer(keras.optimizers.SGD(RATE), plan, 1.0),
        )
    return _tensorflow_privacy_step(rows)


def _tensorflow_privacy_step(rows: int) -> Callable[[], object]:
    sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]
    import tf_keras
    from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
    from tensorflow_privacy.privacy.keras_models import dp_keras_model

    inputs = tf_keras.Input((1,), dtype="int64")
    looked_up = tf_keras.layers.Embedding(rows, WIDTH)(inputs)
    model = dp_keras_model.DPModel(
        1.0,
        1.0,
        use_xla=False,
        layer_registry=layer_registry.make_default_layer_registry(),
        inputs=inputs,
        outputs=tf.reduce_sum(looked_up, axis=2),
    )
    model.compile(tf_keras.optimizers.SGD(RATE), tf_keras.losses.MeanSquaredError())
    ids, targets = (np.reshape(each, [3, BATCH, 1]) for each in examples(rows, BATCH * 3))
    data = tf.data.Dataset.from_tensor_slices((ids, targets))
    train, batches = model.make_train_function(), iter(data.repeat())
    return lambda: train(batches)


def measured(way: str, rows: int, steps: int) -> tuple[float, int]:
    """Median seconds of a step, and bytes of this process at most, beyond those at first."""
    first, seconds = _most(), []
    step = step_of(way, rows, steps)
    for turn in range(WARM_UP + steps):
        begun = time.perf_counter()
        harness.finish(step())
        if turn >= WARM_UP:
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), _most() - first


def _most() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def draw(found: dict[tuple[str, str], tuple[float, int]], path: Path) -> None:
    """Milliseconds of a step, and memory, against rows; both axes are logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for way in dict.fromkeys(way for way, _ in found):
        sizes = [size for other, size in found if other == way]
        rows = [float(size) for size in sizes]
        axes[0].plot(rows, [1e3 * found[way, s][0] for s in sizes], "o-", label=LABELS[way])
        axes[1].plot(rows, [found[way, s][1] / 1e6 for s in sizes], "o-", label=LABELS[way])
    for axis, title in zip(axes, ("milliseconds a step", "memory of the process, MB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="rows of the table", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Measures, and writes the picture where one is asked for."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--picture", type=Path, help="a PNG file")
    options = parser.parse_args()
    there = importlib.util.find_spec("tensorflow_privacy") is not None
    ways = WAYS if there else (STOCK, OURS)
    sizes = QUICK_SIZES if options.quick else SIZES
    steps = QUICK_STEPS if options.quick else STEPS
    found = {
        (way, size): in_own_process(measured, way, sizes[size], steps)
        for size in sizes
        for way in ways
    }
    if options.picture is not None:
        draw(found, options.picture)
    rows = [
        (way, size, 1e3 * found[way, size][0], found[way, size][1] / 1e6) for way, size in found
    ]
    harness.report("table_size", ("", "rows", "ms", "MB"), rows, _metrics(found, sizes), options)


def _metrics(
    found: dict[tuple[str, str], tuple[float, int]], sizes: Iterable[str]
) -> dict[str, float]:
    """Over DP-AdaFEST, and milliseconds and megabytes of each."""
    metrics = {}
    for (way, size), (seconds, memory) in found.items():
        name = {STOCK: "keras", OURS: "adafest", THEIRS: "tensorflow_privacy"}[way]
        metrics |= {f"{name}_ms_{size}": 1e3 * seconds, f"{name}_mb_{size}": memory / 1e6}
    for size in sizes:
        if (THEIRS, size) in found:
            theirs, ours = found[THEIRS, size], found[OURS, size]
            metrics[f"tensorflow_privacy_over_adafest_{size}"] = theirs[0] / ours[0]
            metrics[f"memory_over_adafest_{size}"] = theirs[1] / ours[1]
    return metrics


if __name__ == "__main__":
    main()
