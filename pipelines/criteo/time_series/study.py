"""The paper's experiment on days: runs what is missing, and writes the page.

Table 5, Figure 5 and Figure 6 of Ghazi et al., NeurIPS 2023. Each run trains on 18 days, a period
after the other, and evaluates on the 6 behind them. A finished run is a line of the results at
once, so a study that was stopped goes on.

`python -m pipelines.criteo.time_series.study --made-up PATTERN --slices PATTERN [--minutes N]`,
each pattern naming 24 files. Points without their days are left for another time; without any, the
command writes the page alone. `configs/criteo_time_series_study.py` has the points.
"""

import functools
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

from configs import criteo_time_series_study
from configs.criteo_time_series_study import MADE_UP, SLICES
from pipelines import points
from pipelines.criteo.time_series.days import day_files
from pipelines.criteo.time_series.page import write_page
from pipelines.finished_runs import FinishedRuns
from pipelines.own_process import in_own_process
from pipelines.points import Changes, Run, parser, run_config, run_missing
from pipelines.runs import REFUSALS

_OF_MACHINE = ("seed", "data.days", "directory")
_LATER = (  # settings that change no run made without them
    "optimizer.walk",  # lowers no rate of up to 400 steps
    "adafest.window",  # 1 for all of them
)
results_in = functools.partial(points.results_in, of_machine=(*_OF_MACHINE, *_LATER))


def run_point(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Trains in a folder that is gone afterwards; what goes into the line."""
    from pipelines.criteo.time_series.train import train

    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder))
    return {
        "auc": round(result.auc, 5),
        "log_loss": round(result.log_loss, 5),
        "mean_prediction": round(result.mean_prediction, 5),
        "spent": round(result.epsilon, 4) if math.isfinite(result.epsilon) else None,
        "reduction": round(result.reduction, 2),
        "steps": result.steps,
    }


def run_all(
    config: ml_collections.ConfigDict,
    days: dict[str, str],
    results: FinishedRuns,
    page: Path,
    minutes: float,
) -> int:
    """Runs what is missing and has its days; the status of the command."""

    def train(run: Run, changes: Changes) -> dict[str, Any]:
        own = run_config(config.base, run, changes)
        own.data.days = days[run["group"]]
        return in_own_process(run_point, own)

    def write() -> None:
        write_page(config, results.lines, page)

    wanted = [p for p in config.points if p["group"] in days]
    return run_missing(wanted, results, train, write, minutes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    own = parser(__doc__ or "", "time_series")
    own.add_argument("--made-up", help="a pattern of the files of 24 made-up days")
    own.add_argument("--slices", help="a pattern of 24 slices of Criteo rows")
    options, config = own.parse_args(arguments), criteo_time_series_study.get_config()
    given = {MADE_UP: options.made_up, SLICES: options.slices}
    days = {name: pattern for name, pattern in given.items() if pattern}
    try:
        for pattern in days.values():
            day_files(pattern)
        results = results_in(options.results, config)
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return run_all(config, days, results, options.page, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
