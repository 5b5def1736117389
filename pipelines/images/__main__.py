"""Runs the image job.

`python -m pipelines.images --config configs/mnist_mlp.py --config.data.path=FILE.npz`. `--resume`
goes on with a run that was killed, and `--monitor=N` logs every N steps.
"""

import sys

from absl import app, flags

from pipelines import command
from pipelines.images.data import load
from pipelines.images.train import RunResult, train
from pipelines.runs import REFUSALS, Run

_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in config.report.directory.")
_MONITOR = flags.DEFINE_integer("monitor", 0, "Log each time so many steps were taken.", 0)
_CONFIG = command.config_flag("configs/mnist_mlp.py", "The experiment.")


def summary(result: RunResult) -> str:
    """The result in one line."""
    return (
        f"{result.evaluated_on} accuracy {result.accuracy:.4f}, epsilon {result.epsilon:.3f}, "
        f"delta {result.delta:.2g}, {result.steps} steps in {result.seconds:.0f} s"
    )


def main(arguments: list[str]) -> int:
    """Loads, trains, evaluates and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    try:
        run = Run(config, _RESUME.value, _MONITOR.value)
        result = train(config, *load(config.data), run)
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(result))
    print(result.statement)
    print(f"report: {config.report.directory}/report.html")
    return 0


if __name__ == "__main__":
    command.run(main)
