"""The points of a study: what runs, in which order, and what is finished.

A point is a group on the page, a name, ε (or None), the changes of a base config, and seeds. A run
of it is a line of the results as soon as it has ended, so a study that was stopped goes on.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from pipelines.finished_runs import FinishedRuns
from pipelines.runs import digest_of

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


def told_missing(points: Sequence[Point], lines: Sequence[Run]) -> str:
    """A paragraph of the page that counts them; empty if there are none."""
    left = missing(points, lines)
    groups = ", ".join(dict.fromkeys(run["group"] for run, _ in left))
    return f"\n**Runs that are missing: {len(left)} ({groups}).**\n" if left else ""


def parser(text: str, name: str) -> argparse.ArgumentParser:
    """The options that all studies have; those of one study are added to them."""
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--minutes", type=float, default=math.inf, help="after which none begins")
    made.add_argument("--results", type=Path, default=Path(f"docs/results/{name}.jsonl"))
    made.add_argument("--page", type=Path, default=Path(f"docs/results/{name}.md"))
    return made


def results_in(
    path: Path, config: ml_collections.ConfigDict, of_machine: Sequence[str]
) -> FinishedRuns:
    """The finished runs in a file.

    Args:
        path: The file; it need not exist.
        config: Of the study, whose `base` the runs share.
        of_machine: Settings of the base that change no result.

    Raises:
        ValueError: It has runs of another base.
    """
    return FinishedRuns(path, digest_of(config.base, of_machine))


def run_missing(
    points: Sequence[Point],
    results: FinishedRuns,
    train: Callable[[Run, Changes], dict[str, Any]],
    write: Callable[[], None],
    minutes: float,
) -> int:
    """Runs what is missing, one after the other; one that fails does not stop the others.

    Args:
        points: Of the study.
        results: Where each run becomes a line.
        train: What comes of a run.
        write: Writes the page of the results; after each run, and at the end.
        minutes: After which none begins.

    Returns:
        The status of the command: 1 if a run failed.
    """
    until, failed = time.monotonic() + 60 * minutes, []
    for run, changes in missing(points, results.lines):
        if time.monotonic() > until:
            print("the time is over: the same command does the rest", flush=True)
            break
        try:
            found = train(run, changes)
        except Exception as error:  # whatever a run may raise
            failed.append(f"{_told(run)}: {type(error).__name__}: {error}")
            continue
        results.add({**run, **found})
        write()
        print(f"finished: {_told(run)}", flush=True)
    write()
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _told(run: Run) -> str:
    return ", ".join(f"{name}={run[name]}" for name in ("group", "name", "epsilon", "seed"))


def _is_there(run: Run, lines: Sequence[Run]) -> bool:
    return any(all(line[name] == run[name] for name in run) for line in lines)
