"""Runs many training runs, each in its own process, and continues after an interruption.

`python -m pipelines.criteo.sweep --config=CONFIG --config.data.path=FILE`, with a config such as
`configs/criteo_kaggle/tradeoff.py`.

A config has `base`, a config of the Criteo pipeline, and `points`: a name, a seed and changes of
`base` for each run. It also has `directory` for all results, `workers`, how many points run at a
time, and `kind`, which report `pipelines.criteo.sweep_report` writes at the end: "tradeoff",
"hyperparameters" or "models". A finished point is one JSON file under `directory`, written whole or
not at all, together with the held-out logits. A point whose file exists is not run again.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from absl import app

from pipelines import command
from pipelines.criteo.records import PreparedData, PrepareError, prepared_in
from pipelines.criteo.sweep_report import write_report
from pipelines.files import whole_file
from pipelines.runs import flattened

_CONFIG = command.config_flag(None, "The sweep.")
_UNNAMED = ("data.path", "data.prepared", "report.directory", "report.verbose")  # change no result


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: Its name in tables; points that differ in their seed alone have the same name.
        seed: The seed of the initial weights.
        changes: Dotted keys of the base config, with their values.
    """

    name: str
    seed: int
    changes: dict[str, Any]


def points_of(config: ml_collections.ConfigDict) -> list[Point]:
    """The points of a sweep's config, in its order."""
    return [Point(p["name"], p["seed"], dict(p["changes"])) for p in config.points]


def run_config(config: ml_collections.ConfigDict, point: Point) -> ml_collections.ConfigDict:
    """The Criteo config of one point.

    Raises:
        KeyError: The base does not have a key that is changed.
        ValueError: A change of the data, which must be the same for all points.
    """
    own = config.base.copy_and_resolve_references()
    own.data.path = config.data.path
    own.seed = point.seed
    for key, value in point.changes.items():
        *parents, last = key.split(".")
        if parents[:1] == ["data"]:
            raise ValueError(f"{point.name} changes {key}, but the points of a sweep share data.")
        section = own
        for parent in parents:
            section = section[parent]
        if last not in section:
            raise KeyError(f"{point.name} changes {key}, which the base config does not have.")
        section[last] = value
    return own


def result_path(config: ml_collections.ConfigDict, point: Point) -> Path:
    """The path of a point's result; its name depends on everything that decides the result."""
    settings = run_config(config, point)
    flat = {name: str(value) for name, value in flattened(settings).items()}
    decisive = {name: value for name, value in flat.items() if name not in _UNNAMED}
    status = os.stat(config.data.path)
    source = [status.st_size, status.st_mtime_ns]
    hashed = hashlib.sha256(json.dumps([source, decisive], sort_keys=True).encode()).hexdigest()
    return Path(config.directory) / "points" / f"{point.name}-{point.seed}-{hashed[:12]}.json"


def run_point(config: ml_collections.ConfigDict, point: Point) -> None:
    """Trains one point and writes its result."""
    threads = max(1, (os.cpu_count() or 1) // config.workers)
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))  # read by the import below
    from pipelines.criteo.train import train

    settings = run_config(config, point)
    result = train(settings, _prepared(config))
    rows = result.report.history.rows if result.report is not None else []
    description = {
        "name": point.name,
        "seed": point.seed,
        "changes": point.changes,
        "method": result.method,
        "auc": result.auc,
        "log_loss": result.log_loss,
        "mean_prediction": result.mean_prediction,
        "calibrated_log_loss": result.calibrated_log_loss,
        "validation_auc": result.validation_auc,
        "reduction": result.reduction,
        "epsilon": result.epsilon if math.isfinite(result.epsilon) else None,
        "steps": result.steps,
        "ms_per_step": result.ms_per_step,
        "rows_per_step": np.mean(rows, axis=0).tolist() if rows else [],
    }
    path = result_path(config, point)
    with whole_file(path.with_suffix(".npy")) as file:
        np.save(file, result.scores)
    with whole_file(path) as file:
        file.write(json.dumps(description, indent=1).encode())


def _prepared(config: ml_collections.ConfigDict) -> PreparedData:
    """The records, which are the same for all points."""
    directory, source = Path(config.directory), Path(config.data.path)
    return prepared_in(directory, source, config.base.data.vocabularies)


def run_all(config: ml_collections.ConfigDict) -> list[str]:
    """Runs the missing points, `config.workers` at a time; returns a line for each that failed."""
    missing = [p for p in points_of(config) if not result_path(config, p).exists()]
    print(f"{len(points_of(config))} points, {len(missing)} to run", flush=True)
    failed = []
    processes = concurrent.futures.ProcessPoolExecutor(
        config.workers, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    with processes:
        running = {processes.submit(run_point, config, p): p for p in missing}
        for done, future in enumerate(concurrent.futures.as_completed(running), start=1):
            point, error = running[future], future.exception()
            if error is not None:
                failed.append(f"{point.name}, seed {point.seed}: {type(error).__name__}: {error}")
            print(f"[{done}/{len(missing)}] {point.name}, seed {point.seed}", flush=True)
    return failed


def main(arguments: list[str]) -> int:
    """Runs a sweep and reports on it."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    if config is None or "points" not in config or not Path(config.data.path).is_file():
        path = None if config is None else config.data.path
        print(
            "error: Expected --config=FILE, the config of a sweep, and --config.data.path=FILE of "
            f"Criteo rows, got data.path={path!r}.",
            file=sys.stderr,
        )
        return 1
    if not config.base.data.validation_fraction:
        print("error: Expected base.data.validation_fraction > 0, got 0.", file=sys.stderr)
        return 1
    try:
        data = _prepared(config)
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = run_all(config)
    found = [(p, result_path(config, p)) for p in points_of(config)]
    done = [
        json.loads(path.read_text()) | {"path": str(path)} for _, path in found if path.exists()
    ]
    write_report(config, data, done)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    command.run(main)
