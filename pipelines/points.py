"""The points of a study: what runs, in which order, and what is finished.

A point is a group on the page, a name, ε (or None), the changes of a base config, and seeds. A run
of it is a line of the results as soon as it has ended, so a study that was stopped goes on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_collections

from pipelines.finished_runs import FinishedRuns

Point = dict[str, Any]
Run = dict[str, Any]  # group, name, epsilon, seed, and in a finished one what came of it
Changes = dict[str, Any]  # dotted keys of a base config, with their values


def point(
    group: str, name: str, epsilon: float | None, changes: Changes, seeds: Sequence[int]
) -> Point:
    """One point of a study."""
    own = {"group": group, "name": name, "epsilon": epsilon, "changes": changes}
    return {**own, "seeds": tuple(seeds)}


def runs_of(points: Sequence[Point]) -> Iterator[tuple[Run, Changes]]:
    """Every run and its changes: the first seeds of all points, then the others."""
    for place in range(max((len(point["seeds"]) for point in points), default=0)):
        for own in points:
            if place < len(own["seeds"]):
                names = {name: own[name] for name in ("group", "name", "epsilon")}
                yield {**names, "seed": own["seeds"][place]}, dict(own["changes"])


def run_config(
    base: ml_collections.ConfigDict, run: Run, changes: Changes
) -> ml_collections.ConfigDict:
    """The config of one run.

    Raises:
        KeyError: The base does not have a key that is changed.
    """
    own = base.copy_and_resolve_references()
    own.update_from_flattened_dict(changes)
    own.seed = run["seed"]
    if run["epsilon"] is not None:
        own.privacy.epsilon = run["epsilon"]
    return own


def missing(points: Sequence[Point], lines: Sequence[Run]) -> list[tuple[Run, Changes]]:
    """The runs that are not finished, with their changes."""
    return [(run, changes) for run, changes in runs_of(points) if not _is_there(run, lines)]


def run_missing(
    points: Sequence[Point],
    results: FinishedRuns,
    train: Callable[[Run, Changes], dict[str, Any]],
    finished: Callable[[Run], None],
    minutes: float,
) -> list[str]:
    """Runs what is missing, one after the other.

    Args:
        points: Of the study.
        results: Where each run becomes a line.
        train: What comes of a run.
        finished: Called with each line.
        minutes: After which none begins.

    Returns:
        A sentence for each run that failed; the others went on.
    """
    until, failed = time.monotonic() + 60 * minutes, []
    for run, changes in missing(points, results.lines):
        if time.monotonic() > until:
            print("the time is over: the same command does the rest", flush=True)
            break
        try:
            found = train(run, changes)
        except Exception as error:  # whatever a run may raise
            failed.append(f"{run}: {type(error).__name__}: {error}")
            continue
        results.add({**run, **found})
        finished(results.lines[-1])
    return failed


def _is_there(run: Run, lines: Sequence[Run]) -> bool:
    return any(all(line[name] == run[name] for name in run) for line in lines)
