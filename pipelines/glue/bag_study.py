"""The study of the bag of words: runs what is missing, and writes the page.

`python -m pipelines.glue.bag_study --data FOLDER --tokenizer FOLDER [--minutes N]` runs one point
after the other, each in its own process, and writes the page after each. A finished run is a line
of `--results` at once, so a study that was stopped goes on. Without `--data` it writes the page.
"""

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

from configs import glue_bag_study
from pipelines import points
from pipelines.finished_runs import FinishedRuns
from pipelines.glue.bag_page import write_page
from pipelines.own_process import in_own_process
from pipelines.points import Changes, Run, parser, run_config, run_missing

_OF_MACHINE = ("seed", "data.path", "data.prepared", "model.tokenizer", "selection.counts")
_LATER = ("adafest.window",)  # 1 for all runs that were made without it
results_in = functools.partial(points.results_in, of_machine=(*_OF_MACHINE, *_LATER))


def run_point(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Trains one bag of words; what goes into its line."""
    from pipelines.glue.bag import train

    found = train(config)
    return {
        "accuracy": {name: round(value, 5) for name, value in found.accuracy.items()},
        "auc": {name: round(value, 5) for name, value in found.auc.items()},
        "reduction": None if math.isinf(found.reduction) else round(found.reduction, 2),
        "steps": found.steps,
        "words": found.words,
        "training_rows": found.training_rows,
        "resampled": found.resampled,
    }


def run_all(
    config: ml_collections.ConfigDict, results: FinishedRuns, page: Path, minutes: float
) -> int:
    """Runs what is missing, for so many minutes at most; the status of the command."""

    def train(run: Run, changes: Changes) -> dict[str, Any]:
        return in_own_process(run_point, run_config(config.base, run, changes))

    def write() -> None:
        write_page(config, results.lines, page)

    return run_missing(config.points, results, train, write, minutes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    own = parser(__doc__ or "", "bag")
    own.add_argument("--data", help="a folder with SST-2; without it, the page alone")
    own.add_argument("--tokenizer", help="a folder with RoBERTa's BPE")
    own.add_argument("--prepared", default="runs/glue_bag-tokens", help="of tokens")
    options, config = own.parse_args(arguments), glue_bag_study.get_config()
    if (options.data is None) != (options.tokenizer is None):
        own.error("expected --data and --tokenizer together, got one of them")
    try:
        results = results_in(options.results, config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.data is None:
        write_page(config, results.lines, options.page)
        return 0
    config.base.data.path, config.base.data.prepared = options.data, options.prepared
    config.base.model.tokenizer = config.base.selection.counts = options.tokenizer
    return run_all(config, results, options.page, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
