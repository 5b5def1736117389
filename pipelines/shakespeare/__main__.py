"""Runs the character model.

`python -m pipelines.shakespeare --config configs/shakespeare.py --config.data.path=FILE.txt`.
`--resume` goes on with a private run that was killed, and `--monitor=N` logs every N steps.
"""

import sys

from absl import app, flags

from pipelines import command
from pipelines.runs import REFUSALS
from pipelines.sequences.plans import run_of
from pipelines.shakespeare.run import Result, run

_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in config.report.directory.")
_MONITOR = flags.DEFINE_integer("monitor", 0, "Log each time so many steps were taken.", 0)
_CONFIG = command.config_flag("configs/shakespeare.py", "The experiment.")


def summary(result: Result) -> str:
    """The result in one line."""
    epsilon = "none" if result.epsilon is None else f"{result.epsilon:.3f}"
    return (
        f"held-out loss {result.loss:.4f} nats, accuracy {result.accuracy:.4f}, epsilon {epsilon}, "
        f"{result.steps} steps in {result.seconds:.0f} s; {result.left_out} characters left out"
    )


def main(arguments: list[str]) -> int:
    """Loads, trains, judges and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    try:
        result = run(config, run_of(config, _RESUME.value, _MONITOR.value))
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(result))
    print(result.statement)
    return 0


if __name__ == "__main__":
    command.run(main)
