"""Runs the study, or what of it is missing, and writes its page.

`python -m pipelines.defaults --config=configs/defaults.py --config.data.criteo=FILE
--config.data.movielens=FILE --config.data.mnist=FILE`
"""

import sys
from pathlib import Path

from absl import app
from ml_collections import config_flags

from pipelines.defaults import search
from pipelines.defaults.page import page
from pipelines.defaults.run import task_of
from pipelines.defaults.tasks import Sources
from pipelines.files import whole_file

_CONFIG = config_flags.DEFINE_config_file("config", "configs/defaults.py", "The study.")


def main(arguments: list[str]) -> int:
    """Runs and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    missing = [f"data.{name}" for name, path in config.data.items() if not Path(path).is_file()]
    if missing:
        print(f"error: Expected a file for each of {', '.join(missing)}.", file=sys.stderr)
        return 1
    search.limit_threads(config.workers)
    sources = Sources(
        **{k: Path(v) for k, v in config.data.items()}, directory=Path(config.directory)
    )
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


if __name__ == "__main__":
    app.run(main)
