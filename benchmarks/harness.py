"""Timing in turns, and the report of every benchmark.

Candidates run one after the other, round after round, in one process, and their medians are
compared, so that a slow minute of a shared machine slows all of them alike. The last line printed
is one JSON object: the benchmark's name and metrics, whether the run was quick, and the machine,
date, commit and versions. `--out` appends that line, with the table, to a file, and
`benchmarks.table` makes tables of docs/results from such lines.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

ROOT = Path(__file__).parents[1]


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark; `--quick` ends within a minute and has the same keys."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="fewer rounds, the same keys")
    made.add_argument("--out", type=Path, help="a JSON-lines file to which the result is appended")
    return made


def arguments(description: str) -> argparse.Namespace:
    """The command line of a benchmark without other options."""
    return parser(description).parse_args()


def in_turns(
    candidates: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2
) -> dict[str, float]:
    """Median seconds of each candidate, called once a round after `warm_up` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warm_up + rounds):
        for name, run in candidates.items():
            begun = time.perf_counter()
            finish(run())
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in seconds.items()}


def finish(result: object) -> None:
    """Waits for the tensors of `result`."""
    for value in tf.nest.flatten(result):
        if tf.is_tensor(value):
            value.numpy()


def forget() -> None:
    """Frees the memory of the last candidates."""
    tf.keras.backend.clear_session()
    gc.collect()


def report(
    name: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    metrics: Mapping[str, float],
    options: argparse.Namespace,
) -> None:
    """Prints the table and the JSON line, and appends the line to the file of `--out`."""
    lines = [list(map(str, headers)), *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    print(*text, sep="\n")
    rounded = {key: float(f"{value:.4g}") for key, value in metrics.items()}
    result = {"benchmark": name, "metrics": rounded, "quick": options.quick} | _origin()
    print(json.dumps(result))
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as results:
            results.write(f"{json.dumps({**result, 'printed': text})}\n")


def _shown(cell: object) -> str:
    return f"{cell:,.4g}" if isinstance(cell, float) else str(cell)


def _origin() -> dict[str, object]:
    """The machine, date, commit and versions of a measurement."""
    return {
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }


def _cpu_model() -> str:
    """As Linux names it; elsewhere as Python does."""
    described = Path("/proc/cpuinfo")
    for line in described.read_text().splitlines() if described.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The short hash, with `+` if files differ from it; "unknown" outside of a repository.

    Results do not count as a difference, or only the first of several runs could be clean.
    """
    try:
        short = _git("rev-parse", "--short", "HEAD").strip()
        differing = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results.jsonl")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{short}+" if differing else short


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
