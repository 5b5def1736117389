"""Memory and time of exporting a model with a large table, whole and by rows.

A process of its own trains a small model with DP-AdaFEST and exports it, so that all libraries are
loaded, and notes its memory. Then it builds a model with a table of 1e7 rows of 64 float32 values
(2.6 GB), trains it for a step, exports it, trains on, exports the rows that changed and applies
them. The peak of its memory in each of these, above what was noted, is a multiple of the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile

from benchmarks import harness

_WIDTH = 64

_EXPORT = """
import gc, json, os, sys, time
from pathlib import Path
import keras
import numpy as np
import dp_sparse

rows, width, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

def memory(what):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return 1024 * int(line.split()[1])

def built(rows):
    ids = keras.Input((), dtype="int32")
    table = keras.layers.Embedding(rows, width, embeddings_initializer="zeros", name="table")
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(table(ids)))
    sampling = dp_sparse.PoissonSampling(num_examples=4096, expected_batch_size=1024, steps=4)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-6), sampling).with_noise(1.0)
    sgd = keras.optimizers.SGD(0.1)
    model.compile(dp_sparse.DPAdaFESTOptimizer(sgd, plan, clip_norm=1.0), loss="mse")
    return model, rows

def step(model, rows):
    ids = np.random.default_rng(0).integers(0, rows, 4096).astype(np.int32)
    batches = model.optimizer.plan.sampling.batches((ids, np.ones(4096, np.float32)))
    model.fit(batches, steps_per_epoch=1, epochs=1, verbose=0)

def run(name, rows):
    before = memory("VmRSS")
    model, rows = built(rows)
    step(model, rows)
    found = {}
    base, delta, made = (folder / f"{name}_{part}" for part in ("base", "delta", "made"))
    for part, work in (
        ("export", lambda: dp_sparse.export_model(model, base)),
        ("train", lambda: step(model, rows)),
        ("delta", lambda: dp_sparse.export_delta(model, delta, base=base)),
        ("apply", lambda: dp_sparse.apply_deltas(base, [delta], made)),
    ):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        begun = time.perf_counter()
        work()
        found[part + "_seconds"] = time.perf_counter() - begun
        found[part + "_peak"] = memory("VmHWM") - before
    size = lambda path: sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return found | {"delta_bytes": size(delta), "export_bytes": size(base)}

run("small", 1000)
gc.collect()
print(json.dumps(run("large", rows)))
"""


def measured(rows: int) -> dict[str, float]:
    """Seconds, peaks of memory and sizes of files, for a table of so many rows."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _EXPORT, str(rows), str(_WIDTH), folder],
            check=True,
            capture_output=True,
            text=True,
            cwd=harness.ROOT,
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(options: argparse.Namespace) -> int:
    """Of the table."""
    return 1_000_000 if options.quick else 10_000_000


def main() -> None:
    """Prints peaks over the table's size, and seconds."""
    options = harness.arguments(__doc__ or "")
    rows = rows_of(options)
    found, table = measured(rows), rows * _WIDTH * 4
    metrics = {
        "export_memory_over_table": found["export_peak"] / table,
        "delta_memory_over_table": found["delta_peak"] / table,
        "apply_memory_over_table": found["apply_peak"] / table,
        "export_seconds": found["export_seconds"],
        "delta_bytes_over_export": found["delta_bytes"] / found["export_bytes"],
    }
    shown = [
        (part, found[f"{part}_peak"] / table, found[f"{part}_seconds"])
        for part in ("export", "delta", "apply")
    ]
    harness.report("export", ("", "memory over table", "seconds"), shown, metrics, options)


if __name__ == "__main__":
    main()
