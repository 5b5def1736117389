"""The paper's experiment on days: Table 5, Figure 5 and Figure 6 of Ghazi et al., NeurIPS 2023.

Each run trains on 18 days, a period after the other, and evaluates on the 6 behind them. A finished
run is a line of the results file at once; the same command does the rest.

`python -m pipelines.criteo.time_series.study --data NAME=PATTERN ... --results FILE.jsonl --page
FILE.md`, each PATTERN naming the 24 days of one data set.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_collections

from configs import criteo_time_series
from pipelines.criteo.time_series.page import page
from pipelines.criteo.time_series.train import train
from pipelines.finished_runs import FinishedRuns
from pipelines.own_process import in_own_process

PERIODS = (1, 2, 4, 8, 16, 18)
EPSILONS = (1.0, 3.0, 8.0)
FREQUENCIES = ("first_day", "running", "all_days")
_ROWS, _FALSE_ROWS = (1000, 5000), (32.0, 1000.0)


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        part: `table_5`, `figure_5` or `figure_6`.
        changes: Of `configs/criteo_time_series.py`, by the paths of its fields.
    """

    part: str
    changes: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """What is different about it."""
        return " ".join([self.part, *(f"{key}={value}" for key, value in self.changes)])


def points() -> list[Point]:
    """All runs on one data set, those of few periods first."""
    found = [*_of_table_5(), *_of_figure_5(), *_of_figure_6()]
    return sorted(found, key=lambda point: -dict(point.changes)["period"])


def _of_table_5() -> Iterator[Point]:
    for period in PERIODS:
        yield Point("table_5", (("method", "non_private"), ("period", period)))
        for epsilon in EPSILONS:
            of_budget = ("privacy.epsilon", epsilon)
            yield Point("table_5", (("method", "dp_sgd"), ("period", period), of_budget))


def _of_figure_5() -> Iterator[Point]:
    for period in (PERIODS[0], PERIODS[-1]):
        for rows in _ROWS:
            for frequencies in FREQUENCIES:
                given = (("selection.rows", rows), ("selection.frequencies", frequencies))
                yield Point("figure_5", (("method", "dp_fest"), ("period", period), *given))
        for false_rows in _FALSE_ROWS:
            given_rows = ("adafest.expected_false_rows", false_rows)
            yield Point("figure_5", (("method", "dp_adafest"), ("period", period), given_rows))


def _of_figure_6() -> Iterator[Point]:
    for rows in _ROWS:
        given = (("selection.rows", rows), ("adafest.expected_false_rows", _FALSE_ROWS[0]))
        yield Point("figure_6", (("method", "dp_adafest_plus"), ("period", 1), *given))


def config_of(point: Point, days: str, changes: dict[str, Any]) -> ml_collections.ConfigDict:
    """The settings of a run: four passes over each period in batches of 1,000, as they stand.

    Args:
        point: The run.
        days: Pattern of the files of days.
        changes: For tests: further fields.
    """
    config = criteo_time_series.get_config()
    config.data.days = days
    config.training.batch_size, config.training.epochs = 1000, 4.0
    config.update_from_flattened_dict({**dict(point.changes), **changes})
    return config


def run(point: Point, days: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Trains in a folder that is gone afterwards; returns what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(config_of(point, days, changes), Path(folder))
    return {
        "auc": result.auc,
        "log_loss": result.log_loss,
        "mean_prediction": result.mean_prediction,
        "epsilon": result.epsilon if math.isfinite(result.epsilon) else None,
        "reduction": result.reduction,
        "steps": result.steps,
    }


def study(
    data: dict[str, str], results: FinishedRuns, wanted: Sequence[Point], changes: dict[str, Any]
) -> None:
    """Runs what is missing; each finished run is a line at once."""
    done = {(line["data"], line["name"]) for line in results.lines}
    for name, days in data.items():
        for point in wanted:
            if (name, point.name) in done:
                continue
            line = {"data": name, "name": point.name, "part": point.part}
            result = in_own_process(run, point, days, changes)
            line |= {"changes": dict(point.changes), "result": result}
            results.add(line)
            print(f"{name}: {point.name}: {line['result']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="*", default=[], help="NAME=PATTERN of 24 files")
    parser.add_argument("--results", type=Path, required=True, help="a JSON line for each run")
    parser.add_argument("--page", type=Path, required=True, help="the Markdown page to write")
    options = parser.parse_args(arguments)
    wrong = [given for given in options.data if "=" not in given]
    if wrong:
        print(f"error: Expected --data NAME=PATTERN, got {wrong[0]}.", file=sys.stderr)
        return 1
    data = dict(given.split("=", 1) for given in options.data)
    try:
        results = FinishedRuns(options.results)
        study(data, results, points(), {})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    page(results.lines, options.page, len(points()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
