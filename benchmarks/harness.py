"""Timing in turns, and the form in which every benchmark reports.

Candidates run one after the other, round after round, in one process; medians of each are compared,
so that a slow minute of a shared machine touches all of them alike. The last line printed is one
JSON object with the benchmark's name and metrics.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf


def arguments(description: str) -> argparse.Namespace:
    """The command line of a benchmark: `--quick` ends within a minute and keeps the keys."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, the same keys")
    return parser.parse_args()


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
    """Frees what the last candidates held."""
    tf.keras.backend.clear_session()
    gc.collect()


def report(
    name: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    metrics: Mapping[str, float],
) -> None:
    """Prints the table, then the JSON line."""
    lines = [list(map(str, headers)), *([_shown(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    rounded = {key: float(f"{value:.4g}") for key, value in metrics.items()}
    print(json.dumps({"benchmark": name, "metrics": rounded}))


def _shown(cell: object) -> str:
    return f"{cell:,.4g}" if isinstance(cell, float) else str(cell)
