"""The study of the word table: settings chosen on validation rows, then several seeds.

`python -m pipelines.glue.study --data FOLDER` runs what is missing, one run after the other, each
in its own process, and writes the page after each. A finished run is a line of `--results` at once;
a private one that was killed goes on from its checkpoint.

At the first ε every setting of a method runs once, and the best on the validation rows, which
neither train nor judge, goes on to the other seeds. At the other ε it is used as it is. No ε covers
that choice: it reads validation rows.
"""

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from configs import glue_language
from pipelines.files import whole_file
from pipelines.finished_runs import FinishedRuns
from pipelines.glue.data import VALIDATION
from pipelines.glue.page import UNKNOWN, page
from pipelines.methods import NON_PRIVATE
from pipelines.own_process import in_own_process
from pipelines.runs import Run, digest_of

Point = dict[str, Any]  # method, epsilon (None without privacy), setting, seed
_NAMES = ("method", "epsilon", "setting", "seed")
_OF_RUNS = ("seed", "data.path", "data.prepared", "privacy.epsilon", "report.")  # not the base's


def results_in(path: Path, config: ml_collections.ConfigDict) -> FinishedRuns:
    """The finished runs in a file.

    Raises:
        ValueError: It has runs of another base than that of `config`.
    """
    settings = [set(s) for method in config.methods for s in tried(config, method)]
    of_settings = set.intersection(*settings)  # whatever the base has there
    return FinishedRuns(path, digest_of(config.base, [*_OF_RUNS, *of_settings]))


def result_of(results: FinishedRuns, point: Point) -> dict[str, Any] | None:
    """The line of a point, if it has ended."""
    return next((x for x in results.lines if all(x[n] == point[n] for n in _NAMES)), None)


def tried(config: ml_collections.ConfigDict, method: str) -> list[dict[str, Any]]:
    """The settings of a method, as dotted keys of the base config."""
    return [dict(changes.items()) for changes in config.methods[method]]


def chosen(
    config: ml_collections.ConfigDict, results: FinishedRuns, method: str
) -> dict[str, Any] | None:
    """The setting with the best validation accuracy at the first ε; None until all have run."""
    private = not _is_non_private(config, method)
    epsilon, seed = config.epsilons[0] if private else None, config.seeds[0]
    settings = tried(config, method)
    points = [dict(zip(_NAMES, (method, epsilon, s, seed), strict=True)) for s in settings]
    found = [result_of(results, point) for point in points]
    if None in found:
        return None
    scores = [result["accuracy"][VALIDATION] for result in found if result is not None]
    return settings[scores.index(max(scores))]


def missing(config: ml_collections.ConfigDict, results: FinishedRuns) -> Iterator[Point]:
    """The points to run next, in their order; ask again after each of them."""
    for point in _all(config, results):
        if result_of(results, point) is None:
            yield point


def _all(config: ml_collections.ConfigDict, results: FinishedRuns) -> Iterator[Point]:
    """The first setting of every method, the second, …; then seeds of the chosen ones, ε by ε."""
    methods, seeds = list(config.methods), list(config.seeds)
    first = config.epsilons[0]
    rounds = itertools.zip_longest(*(tried(config, method) for method in methods))
    for settings in rounds:
        for method, setting in zip(methods, settings, strict=True):
            if setting is not None:
                epsilon = None if _is_non_private(config, method) else first
                yield dict(zip(_NAMES, (method, epsilon, setting, seeds[0]), strict=True))
    for epsilon in config.epsilons:
        for seed in seeds:
            for method in methods:
                own = None if _is_non_private(config, method) else epsilon
                setting = chosen(config, results, method)
                if setting is not None and (own is not None or epsilon == first):
                    yield dict(zip(_NAMES, (method, own, setting, seed), strict=True))


def run_config(config: ml_collections.ConfigDict, point: Point) -> ml_collections.ConfigDict:
    """The config of one run.

    Raises:
        KeyError: The base does not have a key that is changed.
    """
    own = config.base.copy_and_resolve_references()
    own.update_from_flattened_dict(point["setting"])
    own.data.path, own.seed = config.data.path, point["seed"]
    own.data.prepared = f"{config.directory}/prepared"
    if point["epsilon"] is not None:
        own.privacy.epsilon = point["epsilon"]
    own.report.directory = f"{config.directory}/{_name(point)}"
    return own


def run_point(config: ml_collections.ConfigDict, point: Point) -> dict[str, Any]:
    """Trains one point, from its checkpoint if there is one; a line of the results."""
    from pipelines.glue.train import train

    settings = run_config(config, point)
    private = point["epsilon"] is not None
    found = train(settings, Run(settings, resume=True) if private else None)
    return {
        **point,
        "accuracy": {name: round(value, 5) for name, value in found.accuracy.items()},
        "steps": found.steps,
        "reduction": _for_json(found.reduction),
        "training_rows": found.training_rows,
    }


def _for_json(reduction: float) -> float | str | None:
    """None where there is no gradient; unknown if no step was left for this process."""
    if math.isinf(reduction):
        return None
    return UNKNOWN if math.isnan(reduction) else round(reduction, 2)


def run_all(config: ml_collections.ConfigDict, results: FinishedRuns, page_path: Path) -> list[str]:
    """Runs what is missing, with the page after each run; a line for each that failed."""
    failed: dict[str, str] = {}
    while True:
        point = next((p for p in missing(config, results) if _name(p) not in failed), None)
        if point is None:
            return list(failed.values())
        print(f"running {_name(point)}", flush=True)
        try:
            results.add(in_own_process(run_point, config, point))
        except Exception as error:  # whatever a run may raise: the others go on
            failed[_name(point)] = f"{_name(point)}: {type(error).__name__}: {error}"
            continue
        write_page(config, results, page_path)
        print(f"{_name(point)}: {results.lines[-1]['accuracy']}", flush=True)


def write_page(config: ml_collections.ConfigDict, results: FinishedRuns, path: Path) -> None:
    """Writes the page of what is finished."""
    settings = {method: chosen(config, results, method) for method in config.methods}
    count = len(list(missing(config, results)))
    with whole_file(path) as file:
        file.write(page(config, results.lines, settings, count).encode())


def _is_non_private(config: ml_collections.ConfigDict, method: str) -> bool:
    return tried(config, method)[0]["method"] == NON_PRIVATE


def _name(point: Point) -> str:
    setting = "_".join(f"{k.split('.')[-1]}={v}" for k, v in sorted(point["setting"].items()))
    return f"{point['method']}_{point['epsilon']}_{setting}_{point['seed']}".replace(" ", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with SST-2; without it, the page alone")
    parser.add_argument("--directory", default="runs/glue_language", help="of checkpoints")
    parser.add_argument("--results", type=Path, default=Path("docs/results/language.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/language.md"))
    parser.add_argument("--threads", type=int, default=0, help="of TensorFlow; 0: all cores")
    options = parser.parse_args(arguments)
    config = glue_language.get_config()
    results = results_in(options.results, config)
    failed = []
    if options.data is not None:
        config.data.path, config.directory = str(options.data), options.directory
        if options.threads:  # of the processes to come
            os.environ["TF_NUM_INTRAOP_THREADS"] = str(options.threads)
            os.environ["TF_NUM_INTEROP_THREADS"] = str(options.threads)
        failed = run_all(config, results, options.page)
    write_page(config, results, options.page)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
