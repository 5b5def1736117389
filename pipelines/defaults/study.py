"""The whole study from its config: what is missing is run, and the page is written."""

import sys
from pathlib import Path

import ml_collections

from pipelines.defaults import search
from pipelines.defaults.page import page
from pipelines.defaults.run import task_of
from pipelines.defaults.tasks import Sources
from pipelines.files import whole_file


def run_study(config: ml_collections.ConfigDict) -> int:
    """Runs and reports; returns 1 if a file is missing or a run failed."""
    missing = [f"data.{name}" for name, path in config.data.items() if not Path(path).is_file()]
    if missing:
        print(f"error: Expected a file for each of {', '.join(missing)}.", file=sys.stderr)
        return 1
    search.limit_threads(config.workers)
    files = {name: Path(path) for name, path in config.data.items()}
    sources = Sources(**files, directory=Path(config.directory))
    results = search.Results(Path(config.results))

    def report() -> None:
        with whole_file(Path(config.page)) as file:
            load = lambda name: task_of(name, sources)  # noqa: E731
            file.write(page(load, results, config.draws).encode())

    failed = search.study(
        config.tasks, config.epsilons, config.draws, sources, results, config.workers, report
    )
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0
