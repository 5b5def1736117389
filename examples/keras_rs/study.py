"""All ten scripts, without privacy and at several budgets: runs what is missing, writes a page.

`python -m examples.keras_rs --run [--minutes N]`; without `--run` it writes the page alone. Each
run has a process of its own, and is a line of `--results` as soon as it has ended.
"""

import dataclasses
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from examples.keras_rs import movielens
from examples.keras_rs.names import POINTS, PRIVATE, SPARSE, STEPS, TUTORIAL, TWO_LINES
from examples.keras_rs.page import page_of
from examples.keras_rs.task import (
    Task,
    adam_of,
    advice_of,
    compile_private,
    compile_stock,
    examples_of,
    expected_batch,
    lines_changed,
    plan_of,
    train,
    train_privately,
)
from pipelines.files import whole_file
from pipelines.finished_runs import FinishedRuns
from pipelines.own_process import in_own_process
from pipelines.points import Changes, Run, parser, run_missing

_TURNS, _STEPS, _WARM_UP = 5, 12, 3


def run_point(run: Run, users: int, films: int) -> dict[str, Any]:
    """What goes into the line of a run.

    Args:
        run: Of `POINTS`.
        users: Of the world.
        films: Likewise.
    """
    script = importlib.import_module(f"examples.keras_rs.{run['group']}")
    if hasattr(script, "virtual_processors"):
        script.virtual_processors()
    world = movielens.made_up(users, films)
    keras.utils.set_random_seed(run["seed"])
    stock = getattr(script, "stock", script.task)
    if run["name"] == STEPS:
        return {"over_stock": _over_stock(stock(world), *(script.task(world) for _ in range(2)))}
    rows, own = None, stock if run["epsilon"] is None else script.task
    task = own(world)
    if run["epsilon"] is not None:
        train_privately(task, run["epsilon"], run["name"])
    else:
        train(task if run["name"] == TUTORIAL else _with_adam(task))
    if run["name"] == SPARSE:
        steps = task.model.optimizer.plan.sampling.steps
        rows = float(task.model.optimizer.diagnostics.rows.numpy().sum()) / steps
    lines = TWO_LINES
    if hasattr(script, "stock"):
        lines = lines_changed(script.InBatch, script.Sampled)
    scores = task.scores(task.model)
    return {"scores": scores, "examples": examples_of(task), "lines": lines, "rows": rows}


def _with_adam(task: Task) -> Task:
    """The same without privacy, with the Adam and the batches of a private run."""
    with task.model.distribute_strategy.scope():
        adam = adam_of(advice_of(task, plan_of(task, 8.0)))
    return dataclasses.replace(task, optimizer=adam, batch_size=expected_batch(task))


class _Clock(keras.callbacks.Callback):
    """When each step has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def _over_stock(stock: Task, private: Task, sparse: Task) -> dict[str, float]:
    """Median times of steps under `fit`, over those of the tutorial's optimizer.

    All take batches of one size, in turns.
    """
    seconds: dict[str, list[float]] = {TUTORIAL: [], PRIVATE: [], SPARSE: []}
    stock = dataclasses.replace(stock, batch_size=expected_batch(private))
    few = compile_stock(stock).take(_STEPS).cache().repeat()  # read once, in the first turn
    runs = {TUTORIAL: (stock, few)}
    for name, task in ((PRIVATE, private), (SPARSE, sparse)):
        runs[name] = task, compile_private(task, 8.0, name)
    for turn in range(_WARM_UP + _TURNS):
        for name, (task, data) in runs.items():
            clock = _Clock()
            task.model.fit(data, steps_per_epoch=_STEPS, verbose=0, callbacks=[clock])
            if turn >= _WARM_UP:
                seconds[name] += list(np.diff(clock.ends))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {name: round(medians[name] / medians[TUTORIAL], 3) for name in (PRIVATE, SPARSE)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    own = parser(__doc__ or "", "keras_rs")
    own.add_argument("--run", action="store_true", help="what is missing, then the page")
    own.add_argument("--users", type=int, default=movielens.USERS)
    own.add_argument("--films", type=int, default=movielens.FILMS)
    options = own.parse_args(arguments)
    world = options.users, options.films
    try:
        results = FinishedRuns(options.results, f"{world[0]} users, {world[1]} films")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def write() -> None:
        with whole_file(Path(options.page)) as file:
            file.write(page_of(results.lines).encode())

    if not options.run:
        write()
        return 0

    def finished(run: Run, changes: Changes) -> dict[str, Any]:
        return in_own_process(run_point, run, *world)

    return run_missing(POINTS, results, finished, write, options.minutes)
