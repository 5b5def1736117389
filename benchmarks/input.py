"""Preparing and reading Criteo rows for offline Poisson sampling, and what a training step waits.

Rows are made up and prepared by the Beam job, by one worker in a process of its own, once few and
once many, which also tells whether memory grows with them. Then training reads the batches: alone,
and beside steps of the pCTR model, whose wait for the next batch is a share of their time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import keras

import dp_sparse
from benchmarks import harness
from models.pctr import pctr
from pipelines.criteo.generate import generate
from pipelines.criteo.schema import TABLE3_VOCABULARIES, examples_from_fields

_BATCH, _WARM_UP = 2048, 10

_PREPARE = """
import json, resource, sys, time
from pipelines.criteo.prepare.job import new_job
from pipelines.criteo.prepare.run import prepare
source, output, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
job = new_job([source], output, num_examples=count, batch_size=2048.0, epochs=1.0)
begun = time.perf_counter()
prepare(job)
seconds = time.perf_counter() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak": peak}))
"""


def prepared(folder: Path, count: int) -> tuple[dp_sparse.OfflineBatches, dict[str, float]]:
    """The batches of so many made-up rows, and the seconds and the peak memory it took."""
    source, output = folder / f"{count}.tsv", folder / str(count)
    generate(count, source, 1, TABLE3_VOCABULARIES, progress=False)
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE, str(source), str(output), str(count)],
        check=True,
        capture_output=True,
        text=True,
        cwd=harness.ROOT,
    )
    source.unlink()
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return dp_sparse.OfflineBatches(str(output), examples_from_fields), found


def plan_of(source: dp_sparse.OfflineBatches) -> dp_sparse.PrivacyPlan:
    """Any plan on the draw."""
    budget = dp_sparse.PrivacyBudget(epsilon=1.0, delta=1e-6)
    sampling = dp_sparse.offline_sampling(source, shared=True)
    return dp_sparse.PrivacyPlan(budget, sampling).with_noise(1.0)


def rows_per_second(source: dp_sparse.OfflineBatches) -> float:
    """Examples a second, of a loop that only reads; the page cache has the files."""
    plan = plan_of(source)
    begun = time.perf_counter()
    for _ in plan.sampling.batches(source):
        pass
    return source.manifest.num_examples / (time.perf_counter() - begun)


def wait_share(source: dp_sparse.OfflineBatches, steps: int) -> float:
    """The part of a training loop's time in which it waits for batches, after the first steps."""
    plan = plan_of(source)
    model = pctr(TABLE3_VOCABULARIES)
    optimizer = dp_sparse.DPAdaFESTOptimizer(keras.optimizers.Adagrad(0.05), plan, 1.0)
    model.compile(optimizer=optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    batches = iter(plan.sampling.batches(source))
    waited = begun = time.perf_counter()
    total = 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            total, begun = 0.0, time.perf_counter()
        waited = time.perf_counter()
        batch = next(batches)
        total += time.perf_counter() - waited
        harness.finish(model.train_step(batch))
    return total / (time.perf_counter() - begun)


def sizes_of(options: argparse.Namespace) -> Sequence[int]:
    """Few rows and many."""
    return (40_000, 80_000) if options.quick else (100_000, 5_000_000)


def main() -> None:
    """Prints rates, the growth of memory, and the share of a step that waits."""
    options = harness.arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        few, many = sizes_of(options)
        _, small = prepared(Path(name), few)
        source, large = prepared(Path(name), many)
        rows_per_second(source)  # into the page cache
        steps = source.manifest.steps - _WARM_UP
        metrics = {
            "read_rows_per_second": rows_per_second(source),
            "input_wait_share": wait_share(source, min(200, steps)),
            "prepare_rows_per_second_per_core": many / large["seconds"],
            "prepare_memory_many_over_few": large["peak"] / small["peak"],
        }
    rows = list(metrics.items())
    harness.report("input", ("", "rate or ratio"), rows, metrics, options)


if __name__ == "__main__":
    main()
