"""The paper's comparison of next-item models: which is best at which ε, over seeds.

Source: Ding et al. (ICML 2024), Table 2, Figures 4, 7 and 10. A grid of batch sizes and learning
rates is run for each model at one ε, with one seed, and judged by the last item but one
(validation); while the largest rate is the best one, twice that rate is run, too. The best setting
is run at every ε with several seeds, and judged by the last item. No ε covers that choice. A
finished run is a line of the results file at once; the same command does the rest.

`python -m pipelines.movielens.study --config configs/movielens_study.py --config.data.path=FILE`
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import app, flags

from pipelines import command
from pipelines.finished_runs import FinishedRuns
from pipelines.movielens import study_maps, study_page
from pipelines.movielens.run import Result, run
from pipelines.movielens.study_plots import Lines
from pipelines.own_process import in_own_process
from pipelines.runs import digest_of

_FLAGS = flags.FlagValues()  # other modules of one process define a config, too
_CONFIG = command.config_flag("configs/movielens_study.py", "The study.", _FLAGS)
_ONLY_PAGE = flags.DEFINE_bool(
    "only_page", False, "write the page of the runs that are there", flag_values=_FLAGS
)

_OF_POINTS = (  # settings that differ between runs of one study, and where the data lie
    "seed",
    "data.path",
    "data.directory",
    "data.held_out",
    "model.kind",
    "model.tied",
    "privacy.epsilon",
    "training.batch_size",
    "optimizer.learning_rate",
    "study.",
    "report.",
)
MODELS: dict[str, dict[str, dict[str, Any]]] = {  # what each changes of the study's settings
    "re_attention": {"model": {"kind": "re_attention"}},
    "vanilla": {"model": {"kind": "vanilla"}},
    "without_sharing": {"model": {"kind": "vanilla", "tied": False}},
    "gru": {"model": {"kind": "gru"}},
    "lstm": {"model": {"kind": "lstm"}},
    # in the grid alone; the first, of Figure 7, has as many weights as with sharing
    "without_sharing_half_width": {"model": {"kind": "vanilla", "tied": False, "width": 8}},
    "vanilla_width_64": {"model": {"kind": "vanilla", "width": 64}},
    "gru_width_64": {"model": {"kind": "gru", "width": 64}},
    "vanilla_all_items": {"model": {"kind": "vanilla"}, "data": {"filter_items": 0}},
    "gru_all_items": {"model": {"kind": "gru"}, "data": {"filter_items": 0}},
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        model: Of `MODELS`.
        epsilon: Of its budget.
        batch_size: Expected.
        learning_rate: The highest.
        seed: Of the initial weights.
        held_out: "validation" of the grid, "test" of the comparison.
    """

    model: str
    epsilon: float
    batch_size: int
    learning_rate: float
    seed: int = 0
    held_out: str = "validation"

    def config(self, study: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
        """Of `pipelines.movielens`."""
        config = study.copy_and_resolve_references()
        config.seed, config.data.held_out = self.seed, self.held_out
        for part, changes in MODELS[self.model].items():
            config[part].update(changes)
        config.privacy.epsilon = self.epsilon
        config.training.batch_size = self.batch_size
        config.optimizer.learning_rate = self.learning_rate
        config.report.directory = ""
        return config


class Results:
    """The results file: a line for each finished run.

    Args:
        path: The file; it need not exist.
        study: Whose runs they are.

    Raises:
        ValueError: The file has runs of other settings.
    """

    def __init__(self, path: Path, study: ml_collections.ConfigDict) -> None:
        self._file = FinishedRuns(path, digest_of(study, _OF_POINTS))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What each line says."""
        return self._file.lines

    def of(self, point: Point) -> dict[str, Any] | None:
        """What came of a run; None if it has not finished."""
        wanted = dataclasses.asdict(point)
        return next((line["result"] for line in self.lines if line["point"] == wanted), None)

    def add(self, point: Point, result: dict[str, Any]) -> None:
        """Writes one line."""
        self._file.add({"point": dataclasses.asdict(point), "result": result})


def grid(study: ml_collections.ConfigDict, model: str, results: Results) -> list[Point]:
    """The settings among which a model's is chosen, and twice the rate while the largest is best.

    One rate alone is no choice, and stays the only one.
    """
    rates = list(study.study.learning_rates)
    while True:
        points = [
            Point(model, study.study.grid_epsilon, batch, rate)
            for batch in study.study.batch_sizes
            for rate in rates
        ]
        found = _best_of(study, points, results)
        if found is None or len(rates) == 1 or found.learning_rate < max(rates):
            return points
        rates.append(2 * max(rates))


def best(study: ml_collections.ConfigDict, model: str, results: Results) -> Point | None:
    """The best of a model's finished grid; None while it is not finished.

    Scores within `same` points of the best one count as equal: of these the largest rate is best.
    """
    return _best_of(study, grid(study, model, results), results)


def _best_of(
    study: ml_collections.ConfigDict, points: Sequence[Point], results: Results
) -> Point | None:
    """The best of these points; None while one of them is not finished."""
    found = [(point, results.of(point)) for point in points]
    scores = {point: result["ndcg"] for point, result in found if result is not None}
    if len(scores) < len(found):
        return None
    equal = [point for point in scores if scores[point] >= max(scores.values()) - study.study.same]
    return max(equal, key=lambda point: (point.learning_rate, scores[point]))


def missing(study: ml_collections.ConfigDict, results: Results) -> Iterator[Point]:
    """Runs to do, in their order, each of which is added to the results before the next.

    Grids depend on their own runs, those of the comparison on the grids.
    """
    for models in study.study.models:
        for model in models:
            while unfinished := [p for p in grid(study, model, results) if results.of(p) is None]:
                yield unfinished[0]
        for seed in study.study.seeds:
            for epsilon in study.study.epsilons:
                for model in models:
                    point = compared(study, model, epsilon, seed, results)
                    if point is not None and results.of(point) is None:
                        yield point
    for model, rate in study.study.in_grid_alone:
        for batch in study.study.batch_sizes:
            point = Point(model, study.study.grid_epsilon, batch, rate)
            if results.of(point) is None:
                yield point


def compared(
    study: ml_collections.ConfigDict, model: str, epsilon: float, seed: int, results: Results
) -> Point | None:
    """A run of the comparison; None while the model's grid is not finished."""
    chosen = best(study, model, results)
    if chosen is None:
        return None
    return dataclasses.replace(chosen, epsilon=epsilon, seed=seed, held_out="test")


def shown(study: ml_collections.ConfigDict, results: Results) -> tuple[Lines, Lines]:
    """The grids with the runs of the best settings, and the runs of settings that were once best.

    A grid that grows may choose another setting than the one that was compared before.
    """

    def stays(line: dict[str, Any]) -> bool:
        point = Point(**line["point"])
        return point.held_out == "validation" or point == compared(
            study, point.model, point.epsilon, point.seed, results
        )

    lines = results.lines
    return [line for line in lines if stays(line)], [line for line in lines if not stays(line)]


def as_line(result: Result) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "ndcg": round(result.ndcg, 4),
        "hit": round(result.hit, 4),
        "ndcg_unseen": round(result.ndcg_unseen, 4),
        "hit_unseen": round(result.hit_unseen, 4),
        "popularity": {name: round(score, 4) for name, score in result.popularity.items()},
        "curve": {
            str(epoch): [round(found["ndcg"], 4), round(found["hit"], 4)]
            for epoch, found in result.curve.items()
        },
        "steps": result.steps,
        "noise_multiplier": result.noise_multiplier,
        "seconds": round(result.seconds),
    }


def run_point(study: ml_collections.ConfigDict, point: Point) -> dict[str, Any]:
    """What is kept of a run; of the first seed of the comparison its attention maps, too."""
    result = run(point.config(study))
    if point.seed == study.study.seeds[0] and point.held_out == "test":
        study_maps.save(result, Path(study.study.maps), point.model, point.epsilon)
    return as_line(result)


def run_study(
    study: ml_collections.ConfigDict, results: Results, report: Callable[[], None]
) -> None:
    """Runs what is missing, and reports after each run."""
    for point in missing(study, results):
        line = in_own_process(run_point, study, point)
        results.add(point, line)
        print(f"{point}: NDCG@10 {line['ndcg']:.2f} %, {line['seconds']} s", flush=True)
        report()


def main(arguments: Sequence[str]) -> int:
    """Runs the study, or what of it is missing, and writes its page."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    study = _CONFIG.value
    try:
        results = Results(Path(study.study.results), study)

        def report() -> None:
            lines = shown(study, results)
            study_page.write(study, *lines, Path(study.study.page), Path(study.study.maps))

        if not _ONLY_PAGE.value:
            run_study(study, results, report)
        report()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    command.run(main, _FLAGS)
