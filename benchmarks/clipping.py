"""What per-example clipping costs: a training step of five small classifiers, five ways.

Lee and Kifer (arXiv 2009.03106, section 6) compare, on one batch of MNIST's shape: a step without
privacy (stock Keras as it compiles on a CPU, without XLA), "nxBP" (a loop over the examples, one
gradient each), "multiLoss" (the Jacobian of the vector of losses), and exact clipping at the cost
of about one batch gradient: ours and, if it is installed and has all layers, tensorflow-privacy's.
All use Adam; the private ones clip to 1 and add noise. "stock+noise" is a step without privacy,
followed by our noise for as many values. The Transformer reads 64 tokens of 5,000 words, so that
its step takes less than a second. `-` marks what cannot run, or needs more than 512 MiB for
per-example gradients.

Memory is the peak that one warm step adds to the tensors that existed before it, as counted by
TensorFlow's BFC allocator, which all candidates use here. Resident memory would not show it, since
the default allocator does not return memory. Scratch memory of XLA and oneDNN kernels is not
counted.

`--sweep` gives the paper's other figures: `depth` (7), `batch_size` (6), `image_size` (9: a
ResNet-18, batch 32; quickly, without the largest), `max_batch` (section 6.7: the largest batch of a
ResNet-18 on 64 x 64 whose process stays within 2 GiB).
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import resource
from collections.abc import Sequence

import tensorflow as tf

import dp_sparse
from benchmarks import harness
from benchmarks.clipping_ways import WAYS, Build, Step
from models import classifiers, vision

MODELS: dict[str, Build] = {
    "mlp": classifiers.mlp,
    "cnn": classifiers.cnn,
    "rnn": classifiers.rnn,
    "lstm": classifiers.lstm,
    "transformer": functools.partial(classifiers.transformer, 64, vocabulary=5_000),
}
BATCHES = (16, 32, 64, 128)
NAIVE_OVER_OURS = ("mlp", "cnn")
ROUNDS, QUICK_ROUNDS = 20, 10
WARM_UP = 4  # the first three private steps also check that examples do not mix
MEMORY_LIMIT = 2**31


CANNOT = (NotImplementedError, dp_sparse.UnsupportedLayerError, tf.errors.ResourceExhaustedError)
Setting = tuple[str, Build, int]  # name, model, batch


def measured(
    build: Build, batch: int, rounds: int, ways: Sequence[str] = tuple(WAYS)
) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds and added bytes of each way that can run."""
    candidates = {}
    for way in ways:
        try:
            candidates[way] = WAYS[way](build, batch, WARM_UP + rounds + 2)
            harness.finish(candidates[way]())
        except CANNOT:
            candidates.pop(way, None)
    seconds = harness.in_turns(candidates, rounds, WARM_UP)
    added = {way: added_memory(candidates[way]) for way in ("stock", "ours") if way in candidates}
    del candidates
    harness.forget()
    return seconds, added


def added_memory(step: Step) -> int:
    """Bytes of tensors that one call of a warm `step` adds at its peak."""
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    harness.finish(step())
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def peak_memory(way: str, build: Build, batch: int) -> int:
    """This process's peak of resident bytes after two steps."""
    step = WAYS[way](build, batch, 2)
    for _ in range(2):
        harness.finish(step())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def largest_batch(way: str, build: Build) -> int:
    """The largest batch whose process stays within the limit, to within an eighth."""

    def fits(batch: int) -> bool:
        spawn = multiprocessing.get_context("spawn")
        try:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
                return process.submit(peak_memory, way, build, batch).result() <= MEMORY_LIMIT
        except (*CANNOT, concurrent.futures.process.BrokenProcessPool):
            return False

    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _resnet(size: int) -> Build:
    return functools.partial(vision.resnet18, (size, size, 3), num_classes=10)


def _deep(layers: int) -> Build:
    return functools.partial(classifiers.mlp, hidden=(128, 256) * (layers // 2))


SWEEPS: dict[str, list[Setting]] = {
    "depth": [(f"mlp_{layers}_layers", _deep(layers), 128) for layers in (2, 4, 6, 8)],
    "batch_size": [(m, MODELS[m], batch) for m in ("mlp", "cnn", "rnn") for batch in BATCHES],
    "image_size": [(f"resnet18_{size}px", _resnet(size), 32) for size in (32, 64, 128, 256)],
}


def table(name: str, settings: Sequence[Setting], rounds: int, options: argparse.Namespace) -> None:
    """A row for each setting, and the metrics; quickly, without what the metrics do not need."""
    rows: list[tuple[object, ...]] = []
    metrics: dict[str, float] = {}
    memory: list[float] = []
    for label, build, batch in settings:
        naive = ("nxBP",) if label in NAIVE_OVER_OURS else ()
        needed = ("stock", "stock+noise", *naive, "tensorflow-privacy", "ours")
        ways = needed if options.quick else tuple(WAYS)
        seconds, added = measured(build, batch, rounds, ways)
        times = [1000 * seconds[way] if way in seconds else "-" for way in WAYS]
        mebibytes = [added[way] / 2**20 if way in added else "-" for way in ("stock", "ours")]
        rows.append((label, batch, *times, *mebibytes))
        if "ours" in seconds:
            metrics[f"{label}_over_nonprivate_{batch}"] = seconds["ours"] / seconds["stock"]
            memory.append(added["ours"] / added["stock"])
        if naive and "ours" in seconds:
            metrics[f"{label}_naive_over_ours_{batch}"] = seconds["nxBP"] / seconds["ours"]
    metrics["memory_over_nonprivate_max"] = max(memory)
    headers = ("model", "batch", *WAYS, "stock MiB", "ours MiB")
    harness.report(name, headers, rows, metrics, options)


def batches_table(options: argparse.Namespace) -> None:
    """The largest batch of each way."""
    largest = {way: largest_batch(way, _resnet(64)) for way in ("stock", "multiLoss", "ours")}
    headers = ("way", "largest batch")
    harness.report("clipping_max_batch", headers, list(largest.items()), largest, options)


def main() -> None:
    """Prints the table and the metrics, or those of a sweep."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--sweep", choices=[*SWEEPS, "max_batch"], help="one of the paper's others")
    options = parser.parse_args()
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # read when TensorFlow first computes
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.sweep == "max_batch":
        batches_table(options)
    elif options.sweep is not None:
        sizes = slice(-1) if options.quick and options.sweep == "image_size" else slice(None)
        table(f"clipping_{options.sweep}", SWEEPS[options.sweep][sizes], rounds, options)
    else:
        batches = BATCHES[-1:] if options.quick else BATCHES
        settings = [(name, MODELS[name], batch) for name in MODELS for batch in batches]
        table("clipping", settings, rounds, options)


if __name__ == "__main__":
    main()
