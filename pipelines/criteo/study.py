"""The study of what sparsity costs a click model: runs what is missing, and writes the page.

`python -m pipelines.criteo.study --sample FILE --two-million FILE --twenty-million FILE
[--minutes N]` runs one point after the other, each in its own process, and writes the page after
each. A finished run is a line of `--results` at once, so a study that was stopped goes on. Points
without their file are left for another time; without any, the command writes the page alone.
`configs/criteo_study.py` has the points, and `python -m pipelines.criteo.generate --rows=N
--out=FILE` makes up rows.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from configs import criteo_study
from pipelines.criteo.records import PrepareError, prepared_in
from pipelines.criteo.study_page import write_page
from pipelines.finished_runs import FinishedRuns
from pipelines.own_process import in_own_process
from pipelines.points import Changes, Run, run_config, run_missing
from pipelines.runs import REFUSALS, digest_of
from pipelines.scores import constant_log_loss, weighted_auc

RESAMPLES = 100
_ROWS = {  # the option that names a group's rows
    "sample": "sample",
    "two million": "two_million",
    "twenty million": "twenty_million",
    "grid": "sample",
    "models": "sample",
}
_OF_MACHINE = ("seed", "data.path", "data.prepared", "report.directory")


def run_point(config: ml_collections.ConfigDict, directory: str) -> dict[str, Any]:
    """Trains one click model; what goes into its line."""
    from pipelines.criteo.sources import parts
    from pipelines.criteo.train import train

    data = prepared_in(Path(directory), Path(config.data.path), config.data.vocabularies)
    result = train(config, data)
    training, _, held_out = parts(config, data)
    labels = held_out.gather(np.arange(len(held_out)))[1]
    return {
        "method": result.method,
        "auc": round(result.auc, 5),
        "validation_auc": round(result.validation_auc, 5),
        "log_loss": round(result.log_loss, 5),
        "calibrated_log_loss": round(result.calibrated_log_loss, 5),
        "constant_log_loss": round(constant_log_loss(result.rate), 5),
        "reduction": None if math.isinf(result.reduction) else round(result.reduction, 2),
        "entries": round(result.entries, 2),
        "steps": result.steps,
        "training_rows": len(training),
        "held_out_rows": len(held_out),
        "ms_per_step": round(result.ms_per_step, 1),
        "resampled": resampled_auc(labels, result.scores),
    }


def resampled_auc(labels: np.ndarray, scores: np.ndarray) -> list[float]:
    """AUC on rows drawn anew with repetition, which are the same for all runs of as many rows."""
    rng, found = np.random.default_rng(0), []
    ranks = np.unique(scores, return_inverse=True)[1]
    for _ in range(RESAMPLES):
        times = np.bincount(rng.integers(0, len(labels), len(labels)), minlength=len(labels))
        found.append(round(weighted_auc(labels, ranks, times), 5))
    return found


def results_in(path: Path, config: ml_collections.ConfigDict) -> FinishedRuns:
    """The finished runs in a file.

    Raises:
        ValueError: It has runs of another base than that of `config`.
    """
    return FinishedRuns(path, digest_of(config.base, _OF_MACHINE))


def run_all(
    config: ml_collections.ConfigDict,
    files: dict[str, Path],
    results: FinishedRuns,
    page: Path,
    directory: Path,
    minutes: float,
) -> list[str]:
    """Runs what is missing and has its file; a line for each that failed."""
    points = [p for p in config.points if _ROWS[p["group"]] in files]

    def train(run: Run, changes: Changes) -> dict[str, Any]:
        own = run_config(config.base, run, changes)
        own.data.path = str(files[_ROWS[run["group"]]])
        own.report.directory = str(directory)
        return in_own_process(run_point, own, str(directory))

    def finished(line: Run) -> None:
        write_page(config, results.lines, page)
        told = ", ".join(str(line[name]) for name in ("group", "name", "epsilon", "seed"))
        print(f"{told}: AUC {line['auc']:.4f}, reduction {line['reduction']}", flush=True)

    return run_missing(points, results, train, finished, minutes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=Path, help="Criteo rows, a TSV or .gz")
    parser.add_argument("--two-million", type=Path, help="two million made-up rows")
    parser.add_argument("--twenty-million", type=Path, help="twenty million made-up rows")
    parser.add_argument("--directory", type=Path, default=Path("runs/criteo_study"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which none begins")
    parser.add_argument("--results", type=Path, default=Path("docs/results/criteo_kaggle.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/criteo_kaggle.md"))
    options = parser.parse_args(arguments)
    config = criteo_study.get_config()
    files = {name: path for name in _ROWS.values() if (path := getattr(options, name))}
    try:
        for path in files.values():
            prepared_in(options.directory, path, config.base.data.vocabularies)
        results = results_in(options.results, config)
    except (PrepareError, *REFUSALS) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = run_all(config, files, results, options.page, options.directory, options.minutes)
    write_page(config, results.lines, options.page)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
