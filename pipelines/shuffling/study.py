"""Runs what is missing of the study, and writes its lines, pictures and page.

Each finished point is a line of `shuffling.jsonl` at once, so a run that was killed goes on.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.files import whole_file
from pipelines.finished_runs import FinishedRuns
from pipelines.shuffling import attack, pictures, theory, training
from pipelines.shuffling.page import page

Results = dict[str, Any]  # by the name of the point


def points(mnist: Path, sst2: Path, ways: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """What computes each point, by name."""
    data = {"vit": lambda: training.mnist(mnist), "bert": lambda: training.sst2(sst2)}
    models = {"vit": training.vit, "bert": training.bert}
    found: dict[str, Callable[[], Any]] = {
        "figure_2": lambda: [theory.figure_2(sigma, 10_000) for sigma in (0.25, 0.935)],
        "figure_3": theory.figure_3,
        "figure_4": theory.figure_4,
        "attack": lambda: dataclasses.asdict(attack.audit()),
        "table_7": ways,
    }
    for name in models:
        for private in (False, True):
            found[f"{name}_{'private' if private else 'without_noise'}"] = (
                lambda n=name, p=private: training.compared(models[n], *data[n](), p)
            )
    return found


def run(compute: dict[str, Callable[[], Any]], folder: Path) -> Results:
    """Computes the points that have no line yet, and writes page and pictures of all."""
    finished = FinishedRuns(folder / "shuffling.jsonl")
    results: Results = {line["point"]: line["result"] for line in finished.lines}
    for name in [name for name in compute if name not in results]:
        results[name] = json.loads(json.dumps(compute[name]()))
        finished.add({"point": name, "result": results[name]})
    pictures.draw(results, folder)
    with whole_file(folder / "shuffling.md") as file:
        file.write(page(results).encode())
    return results
