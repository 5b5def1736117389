"""The demo: makes Criteo-shaped data, trains the pCTR model without privacy, with DP-SGD at ε = 1
and with DP-AdaFEST at ε = 1 and 8, compares them and writes one page.

`python -m pipelines.criteo.demo [--data=FILE]`: with a file it does the same on real rows, and the
report leaves out what no ε covers. It first says how long it takes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_collections

from configs.criteo_sample import get_config
from pipelines.criteo.generate import generate
from pipelines.criteo.records import load_or_prepare
from pipelines.criteo.report import console_table, costs, notes, statements, write_report
from pipelines.criteo.train import RunResult, train
from pipelines.memory import keep_freed_memory
from pipelines.methods import NON_PRIVATE

ROWS, _SEED = 300_000, 0
RUNS = (  # a method and its ε
    ("non_private", 1.0),
    ("dp_sgd", 1.0),
    ("dp_adafest", 1.0),
    ("dp_adafest", 8.0),
)
_SECONDS, _SECONDS_PER_STEP = 45, 0.31  # of a run on two cores: to begin with, and a step


def run(
    data: Path | None, directory: Path, num_rows: int, runs: Sequence[tuple[str, float]]
) -> list[RunResult]:
    """Trains on `data`, or on so many made-up rows, and writes `directory`/report.html.

    Args:
        data: A Criteo TSV or .gz; None for made-up rows.
        directory: The folder for the rows and the report.
        num_rows: How many rows to make up.
        runs: Pairs of a method and its ε.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = get_config()
    config.report.verbose = 1
    source = data or directory / f"made_up_{num_rows}_rows.tsv"
    if data is None:
        config.report.diagnostics = "non_private"  # made-up clicks need no privacy
        print(duration(config, num_rows, len(runs)))
        if not source.exists():
            print(f"Making {num_rows:,} Criteo-shaped rows ...")
            generate(num_rows, source, seed=_SEED)
    prepared = load_or_prepare(source, directory / f"{source.name}.records")
    if data is not None:
        print(duration(config, prepared.num_records, len(runs)))
    results = []
    for method, epsilon in runs:
        budget = "" if method == NON_PRIVATE else f" at epsilon={epsilon:g}"
        print(f"\nTraining: {method}{budget}")
        config.method, config.privacy.epsilon = method, epsilon
        results.append(train(config, prepared))
    origin = "made-up rows" if data is None else "rows"
    note = (
        f"{source}: {prepared.num_records:,} {origin}, "
        f"the last {config.data.test_fraction:.0%} held out"
    )
    write_report(directory / "report.html", results, prepared, note)
    return results


def duration(config: ml_collections.ConfigDict, num_rows: int, runs: int) -> str:
    """How long so many runs on `num_rows` rows take, as a sentence."""
    training = (1 - config.data.test_fraction) * num_rows
    steps = config.training.epochs * training / config.training.batch_size
    minutes = max(1, round(runs * (_SECONDS + _SECONDS_PER_STEP * steps) / 60))
    unit = "minute" if minutes == 1 else "minutes"
    trained = "1 run" if runs == 1 else f"{runs} runs"
    return f"{trained} on {num_rows:,} rows: about {minutes:,} {unit} on 2 cores."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a Criteo TSV or .gz instead of made-up rows")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the report goes")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    try:
        results = run(options.data, options.out, ROWS, RUNS)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    lines = [console_table(results), *notes(results), "", *statements(results), "", *costs(results)]
    print("\n".join(["", *lines, f"Report: {options.out / 'report.html'}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
