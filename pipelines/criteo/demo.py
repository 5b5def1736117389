"""The demo: makes Criteo-shaped data, trains the pCTR model three ways, compares them and writes
one page.

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
from pipelines.criteo.report import console_table, notes, write_report
from pipelines.criteo.train import RunResult, train
from pipelines.memory import keep_freed_memory

ROWS, _SEED = 300_000, 0
METHODS = ("non_private", "dp_sgd", "dp_adafest")
# On two cores: to begin with, and for a step of all three methods.
_SECONDS, _SECONDS_PER_STEP = 40, 0.6


def run(data: Path | None, directory: Path) -> list[RunResult]:
    """Trains three methods on `data`, or on made-up rows, and writes `directory`/report.html."""
    directory.mkdir(parents=True, exist_ok=True)
    config = get_config()
    config.report.verbose = 1
    source = data or directory / f"made_up_{ROWS}_rows.tsv"
    if data is None:
        config.report.diagnostics = "non_private"  # made-up clicks need no privacy
        config.training.epochs = 1.0
        print(duration(config, ROWS))
        if not source.exists():
            print(f"Making {ROWS:,} Criteo-shaped rows ...")
            generate(ROWS, source, seed=_SEED)
    prepared = load_or_prepare(source, directory / f"{source.name}.records")
    if data is not None:
        print(duration(config, prepared.num_records))
    results = []
    for method in METHODS:
        print(f"\nTraining: {method}")
        config.method = method
        results.append(train(config, prepared))
    origin = "made-up rows" if data is None else "rows"
    note = (
        f"{source}: {prepared.num_records:,} {origin}, "
        f"the last {config.data.test_fraction:.0%} held out"
    )
    write_report(directory / "report.html", results, prepared, note)
    return results


def duration(config: ml_collections.ConfigDict, num_rows: int) -> str:
    """How long training on `num_rows` rows takes, as a sentence."""
    training = (1 - config.data.test_fraction) * num_rows
    steps = config.training.epochs * training / config.training.batch_size
    minutes = max(1, round((_SECONDS + _SECONDS_PER_STEP * steps) / 60))
    unit = "minute" if minutes == 1 else "minutes"
    return f"Trains three times on {num_rows:,} rows: about {minutes:,} {unit} on 2 cores."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a Criteo TSV or .gz instead of made-up rows")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the report goes")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    try:
        results = run(options.data, options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(["", console_table(results), *notes(results), ""]))
    for result in results:
        print(f"{result.method}: {result.statement}\n")
    print(f"Report: {options.out / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
