"""The study of the bag of words: runs what is missing, and writes the page.

`python -m pipelines.glue.bag_study --data FOLDER --tokenizer FOLDER [--minutes N]` runs one point
after the other, each in its own process, and writes the page after each. A finished run is a line
of `--results` at once, so a study that was stopped goes on. Without `--data` it writes the page.
"""

import functools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

from configs import glue_bag_study
from pipelines import points
from pipelines.files import whole_file
from pipelines.finished_runs import FinishedRuns
from pipelines.glue.data import HELD_OUT, VALIDATION
from pipelines.glue.tasks import DEV
from pipelines.own_process import in_own_process
from pipelines.points import Changes, Run, parser, run_config, run_missing, told_missing

_OF_MACHINE = ("seed", "data.path", "data.prepared", "model.tokenizer", "selection.counts")
_BASELINE = "DP-SGD"
results_in = functools.partial(points.results_in, of_machine=_OF_MACHINE)

_HEAD = """# A bag of words: where the table is everything

SST-2's phrases as a bag of embeddings over RoBERTa's {rows:,} words: rows of width {width}, their
sum over √words, and one logit. {training:,} rows train, {held_out:,} judge and {validation:,}
others are for choices; no row of a side contains one of another. Every run takes {steps} steps;
Adam at {rate:g}, clip norm {clip:g}, δ = 1/rows; batches of 1,024 unless said. Reduction is the
entries of the word table ÷ those that get noise in a step, on average. DP-AdaFEST has σ1/σ2 = 1 and
1,000 expected false rows unless said; DP-FEST trains 1,000 rows and DP-AdaFEST+ chooses among
3,000, selected for {share:.0%} of ε. LoRA is a frozen random table plus A·B of rank 1, and
DP-AdaFEST beside it chooses rows of A, so that the savings of both multiply.

`python -m pipelines.glue.bag_study --data FOLDER --tokenizer FOLDER` runs what is missing and
writes this page; each run is a line of [bag.jsonl](bag.jsonl). Accuracies are of the held-out rows,
of which the standard error is 0.5 points. ± is the deviation between seeds; where there is no
±, one seed ran. No ε covers the held-out rows.
"""


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
    }


def run_all(
    config: ml_collections.ConfigDict, results: FinishedRuns, page: Path, minutes: float
) -> int:
    """Runs what is missing, for so many minutes at most; the status of the command."""

    def train(run: Run, changes: Changes) -> dict[str, Any]:
        return in_own_process(run_point, run_config(config.base, run, changes))

    def write() -> None:
        write_page(config, results, page)

    return run_missing(config.points, results, train, write, minutes)


def write_page(config: ml_collections.ConfigDict, results: FinishedRuns, path: Path) -> None:
    """Writes the page of what is finished."""
    with whole_file(path) as file:
        file.write(page_of(config, results.lines).encode())


def page_of(config: ml_collections.ConfigDict, lines: Sequence[Run]) -> str:
    """The page."""
    base = config.base
    head = _HEAD.format(
        rows=lines[0]["words"] if lines else 0,
        width=base.model.width,
        training=lines[0]["training_rows"] if lines else 0,
        held_out=base.data.held_out,
        validation=base.data.validation,
        steps=lines[0]["steps"] if lines else 0,
        rate=base.optimizer.options.learning_rate,
        clip=base.privacy.clip_norm,
        share=base.selection.share,
    )
    parts = [head, told_missing(config.points, lines)]
    parts.append("\n## Methods\n\n" + _methods_table(lines))
    for group in dict.fromkeys(point["group"] for point in config.points):
        own = [line for line in lines if line["group"] == group]
        if group != "methods" and own:
            parts.append(f"\n## {TITLES[group]}\n\nAt ε = 3.\n\n{_table(own)}")
    return "".join(parts)


TITLES = {
    "LoRA": "LoRA on the table, alone and with DP-AdaFEST",
    "batch size": "Larger batches, as many steps",
    "rows selected before": "Rows selected before training",
    "contribution clip norm": "C1, the clip norm of contributions",
    "grid": "σ1/σ2 and expected false rows of DP-AdaFEST",
}


def _methods_table(lines: Sequence[Run]) -> str:
    rows = [
        "| ε | method | held-out rows | minus DP-SGD | dev file | reduction |",
        "|---" * 6 + "|",
    ]
    own = [line for line in lines if line["group"] == "methods"]
    for epsilon in sorted({x["epsilon"] for x in own}, key=lambda e: math.inf if e is None else e):
        here = [line for line in own if line["epsilon"] == epsilon]
        base = [x["accuracy"][HELD_OUT] for x in here if x["name"] == _BASELINE]
        for name in dict.fromkeys(line["name"] for line in here):
            runs = [line for line in here if line["name"] == name]
            found = [x["accuracy"][HELD_OUT] for x in runs]
            apart = ""
            if base and name != _BASELINE:
                apart = f"{100 * (statistics.fmean(found) - statistics.fmean(base)):+.1f}"
            cells = (
                "none" if epsilon is None else f"{epsilon:g}",
                name,
                _percent(found),
                apart,
                _percent([x["accuracy"][DEV] for x in runs]),
                _reduction(runs),
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _table(lines: Sequence[Run]) -> str:
    rows = ["| setting | held-out rows | validation rows | reduction |", "|---" * 4 + "|"]
    for name in dict.fromkeys(line["name"] for line in lines):
        runs = [line for line in lines if line["name"] == name]
        by_side = [_percent([x["accuracy"][s] for x in runs]) for s in (HELD_OUT, VALIDATION)]
        rows.append(f"| {' | '.join((name, *by_side, _reduction(runs)))} |")
    return "\n".join(rows) + "\n"


def _percent(values: Sequence[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f} %"
    return mean if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def _reduction(runs: Sequence[Run]) -> str:
    found = [run["reduction"] for run in runs if run["reduction"] is not None]
    return f"{statistics.fmean(found):,.0f}×" if found else "no gradient"


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
        write_page(config, results, options.page)
        return 0
    config.base.data.path, config.base.data.prepared = options.data, options.prepared
    config.base.model.tokenizer = config.base.selection.counts = options.tokenizer
    return run_all(config, results, options.page, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
