"""Runs the recommendation job.

`python -m pipelines.movielens --config configs/movielens.py --config.data.path=FILE`.
`--export=PATH` writes the model for use without this package. `--resume` goes on with a private run
that was killed, and `--monitor=N` logs every N steps.
"""

import sys
from typing import Any

from absl import app, flags

from pipelines import command
from pipelines.movielens.run import Result, run
from pipelines.runs import REFUSALS
from pipelines.sequences.plans import run_of

_EXPORT = flags.DEFINE_string("export", "", "A folder that is not there yet, for the model.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in config.report.directory.")
_MONITOR = flags.DEFINE_integer("monitor", 0, "Log each time so many steps were taken.", 0)
_CONFIG = command.config_flag("configs/movielens.py", "The experiment.")


def summary(result: Result, held_out: str) -> str:
    """The result in one line."""
    epsilon = "none" if result.epsilon is None else f"{result.epsilon:.3f}"
    return (
        f"{held_out} {_described(vars(result))}, epsilon {epsilon}, "
        f"{result.steps} steps in {result.seconds:.0f} s"
    )


def _described(found: dict[str, Any]) -> str:
    return (
        f"NDCG@10 {found['ndcg']:.2f} %, HIT@10 {found['hit']:.2f} % (among unseen items "
        f"{found['ndcg_unseen']:.2f} and {found['hit_unseen']:.2f} %)"
    )


def main(arguments: list[str]) -> int:
    """Loads, trains, judges and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    try:
        kept = run_of(config, _RESUME.value, _MONITOR.value)
        result = run(config, kept, _EXPORT.value, command.say)
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for epoch, found in result.curve.items():
        print(f"epoch {epoch}: {_described(found)}")
    print(f"by popularity: {_described(result.popularity)}")
    print(summary(result, config.data.held_out))
    print(result.statement)
    if _EXPORT.value:
        print(f"export: {_EXPORT.value}")
    return 0


if __name__ == "__main__":
    command.run(main)
