"""Halves the field of settings for each task and budget; continues after an interruption.

Each finished run is one JSON line of the results file, written at once. A run whose line exists is
not run again. Settings are drawn for each method and optimizer, run for a part of their steps, and
the best on the validation examples go on to all steps; of these, the best get more seeds.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipelines.defaults.run import Result, run, task_of
from pipelines.defaults.settings import (
    GRID_EPSILONS,
    NON_PRIVATE,
    Setting,
    clip_norms,
    drawn,
    fixed,
    methods_of,
)
from pipelines.defaults.tasks import Sources, Task
from pipelines.finished_runs import FinishedRuns

FIRST_PART = 0.25  # of the steps, of the first round
WHOLE = 1.0
SEEDS = (0, 1, 2)
_NEXT_BEST = 4  # of the second round, beside the best of each method and optimizer
_BEST = 3  # that get more seeds, beside the best of each method
_RUNS_A_PROCESS = 10  # graphs stay in memory as long as their process


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of the study.

    Attributes:
        task: The name of its task.
        epsilon: Of its budget; None without privacy.
        setting: What it is trained with.
        part: The part of its steps.
        seed: Of the initial weights.
    """

    task: str
    epsilon: float | None
    setting: Setting
    part: float
    seed: int

    def description(self) -> dict[str, Any]:
        """What names the run, ready for JSON."""
        return dataclasses.asdict(self)


class Results:
    """The results file: a line for each finished run.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = FinishedRuns(path)
        self._found: dict[Run, Result] = dict(map(_read, self._file.lines))

    def __contains__(self, one: Run) -> bool:
        return one in self._found

    def __getitem__(self, one: Run) -> Result:
        return self._found[one]

    def items(self) -> Iterable[tuple[Run, Result]]:
        """All finished runs and what came of them."""
        return self._found.items()

    def add(self, one: Run, result: Result) -> None:
        """Writes one line."""
        self._found[one] = result
        self._file.add({**one.description(), "result": result})


def _read(line: dict[str, Any]) -> tuple[Run, Result]:
    named = {name: value for name, value in line.items() if name != "result"}
    return Run(**{**named, "setting": Setting(**named["setting"])}), line["result"]


def study(
    tasks: Iterable[str],
    epsilons: Iterable[float],
    draws: int,
    sources: Sources,
    results: Results,
    workers: int,
    report: Callable[[], None] = lambda: None,
) -> list[str]:
    """Runs what is missing, `workers` at a time, and calls `report` after each task and budget.

    Returns a line for each run that failed.
    """
    failed: list[str] = []
    budgets: list[float | None] = [None, *epsilons]
    for name in tasks:
        for epsilon in budgets:
            submit = functools.partial(_submit, sources, results, failed, workers)
            _bracket(task_of(name, sources), name, epsilon, draws, results, submit)
            report()
    return failed


Submit = Callable[[list[Run]], None]


def _bracket(
    task: Task, name: str, epsilon: float | None, draws: int, results: Results, submit: Submit
) -> None:
    methods = (NON_PRIVATE,) if epsilon is None else methods_of(task)
    settings = drawn(task, methods, draws, seed=0)
    runs = [Run(name, epsilon, setting, FIRST_PART, SEEDS[0]) for setting in settings]
    submit(runs)
    chosen = survivors([r for r in runs if r in results], results)
    if epsilon is not None:
        chosen += fixed(task)
    if epsilon in GRID_EPSILONS:
        chosen += clip_norms(task)
    whole = [Run(name, epsilon, setting, WHOLE, SEEDS[0]) for setting in dict.fromkeys(chosen)]
    submit(whole)
    of_search = [r for r in whole if r in results and r.setting in settings]
    best = finalists(of_search, results)
    if epsilon is not None:
        best += fixed(task)
    submit([Run(name, epsilon, s, WHOLE, seed) for s in dict.fromkeys(best) for seed in SEEDS[1:]])


def survivors(runs: list[Run], results: Results) -> list[Setting]:
    """The best of each method and optimizer, and the next best of all."""
    ordered = _ordered(runs, results)
    of_families = _first_by(ordered, lambda setting: setting.family)
    rest = [setting for setting in ordered if setting not in of_families]
    return of_families + rest[:_NEXT_BEST]


def finalists(runs: list[Run], results: Results) -> list[Setting]:
    """The best, and the best of each method."""
    ordered = _ordered(runs, results)
    of_methods = _first_by(ordered, lambda setting: setting.method)
    return list(dict.fromkeys(ordered[:_BEST] + of_methods))


def _ordered(runs: list[Run], results: Results) -> list[Setting]:
    return [r.setting for r in sorted(runs, key=lambda r: -results[r]["validation"])]


def _first_by(settings: list[Setting], key: Callable[[Setting], Any]) -> list[Setting]:
    found: dict[Any, Setting] = {}
    for setting in settings:
        found.setdefault(key(setting), setting)
    return list(found.values())


def _submit(
    sources: Sources, results: Results, failed: list[str], workers: int, runs: list[Run]
) -> None:
    """Runs what is missing, in new processes after every few runs.

    `max_tasks_per_child` would do that, but up to Python 3.13 the pool may then wait forever
    (CPython issue 115634).
    """
    missing = [one for one in runs if one not in results]
    few = workers * _RUNS_A_PROCESS
    for begin in range(0, len(missing), few):
        with _processes(workers) as pool:
            running = {
                pool.submit(_in_process, one, sources): one for one in missing[begin : begin + few]
            }
            for future in concurrent.futures.as_completed(running):
                one, error = running[future], future.exception()
                if error is None:
                    results.add(one, future.result())
                else:
                    failed.append(f"{one}: {type(error).__name__}: {error}")
        done = min(begin + few, len(missing))
        print(
            f"{one.task}, epsilon {one.epsilon}, part {one.part}: {done}/{len(missing)}", flush=True
        )


def _processes(workers: int) -> concurrent.futures.Executor:
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)


def _in_process(one: Run, sources: Sources) -> Result:
    return run(task_of(one.task, sources), one.setting, one.epsilon, one.part, one.seed)


def limit_threads(workers: int) -> None:
    """Shares the processor among the processes to come."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
