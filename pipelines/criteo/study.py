"""The study of what sparsity costs a click model: runs what is missing, and writes the page.

`python -m pipelines.criteo.study --sample FILE --two-million FILE --twenty-million FILE
[--minutes N]` runs one point after the other, each in its own process, and writes the page after
each. A finished run is a line of `--results` at once, so a study that was stopped goes on. Points
without their file are left for another time; without any, the command writes the page alone.
`configs/criteo_study.py` has the points, and `python -m pipelines.criteo.generate --rows=N
--out=FILE` makes up rows.
"""

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from configs import criteo_study
from pipelines import points
from pipelines.criteo.records import PrepareError, prepared_in
from pipelines.criteo.study_page import write_page
from pipelines.finished_runs import FinishedRuns
from pipelines.own_process import in_own_process
from pipelines.points import Changes, Run, parser, run_config, run_missing
from pipelines.resampling import resampled_auc
from pipelines.runs import REFUSALS
from pipelines.scores import constant_log_loss

_ROWS = {  # the option that names a group's rows
    "sample": "sample",
    "two million": "two_million",
    "twenty million": "twenty_million",
    "grid": "sample",
    "models": "sample",
}
_OF_MACHINE = ("seed", "data.path", "data.prepared", "report.directory")
_LATER = (  # settings that change no run made without them
    "optimizer.walk",  # lowers no rate of up to 400 steps
    "adafest.window",  # 1 for all of them
)
results_in = functools.partial(points.results_in, of_machine=(*_OF_MACHINE, *_LATER))


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


def run_all(
    config: ml_collections.ConfigDict,
    files: dict[str, Path],
    results: FinishedRuns,
    page: Path,
    directory: Path,
    minutes: float,
) -> int:
    """Runs what is missing and has its file; the status of the command."""

    def train(run: Run, changes: Changes) -> dict[str, Any]:
        own = run_config(config.base, run, changes)
        own.data.path = str(files[_ROWS[run["group"]]])
        own.report.directory = str(directory)
        return in_own_process(run_point, own, str(directory))

    def write() -> None:
        write_page(config, results.lines, page)

    wanted = [p for p in config.points if _ROWS[p["group"]] in files]
    return run_missing(wanted, results, train, write, minutes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    own = parser(__doc__ or "", "criteo_kaggle")
    own.add_argument("--sample", type=Path, help="Criteo rows, a TSV or .gz")
    own.add_argument("--two-million", type=Path, help="two million made-up rows")
    own.add_argument("--twenty-million", type=Path, help="twenty million made-up rows")
    own.add_argument("--directory", type=Path, default=Path("runs/criteo_study"))
    options, config = own.parse_args(arguments), criteo_study.get_config()
    files = {name: path for name in _ROWS.values() if (path := getattr(options, name))}
    try:
        for path in files.values():
            prepared_in(options.directory, path, config.base.data.vocabularies)
        results = results_in(options.results, config)
    except (PrepareError, *REFUSALS) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run_all(config, files, results, options.page, options.directory, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
