"""Fine-tunes a language model privately.

`python -m pipelines.glue --config configs/glue_sst2_minilm.py --config.data.path=FOLDER`, a folder
with `train.tsv` and `dev.tsv`. `--export=PATH` writes the model for use on strings, without this
package. `--resume` goes on with a private run that was killed, and `--monitor=N` logs every N
steps.
"""

import sys
from pathlib import Path

import ml_collections
from absl import app, flags

from pipelines import command
from pipelines.glue.train import Result, train
from pipelines.methods import NON_PRIVATE
from pipelines.runs import REFUSALS, Run

_EXPORT = flags.DEFINE_string("export", "", "A folder that is not there yet, for the model.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in config.report.directory.")
_MONITOR = flags.DEFINE_integer("monitor", 0, "Log each time so many steps were taken.", 0)
_CONFIG = command.config_flag("configs/glue_sst2.py", "The experiment.")


def summary(result: Result) -> str:
    """The result in a few lines."""
    found = ", ".join(f"{name} {100 * value:.2f} %" for name, value in result.accuracy.items())
    return "\n".join(
        [
            *(f"step {step}: accuracy {100 * value:.2f} %" for step, value in result.curve),
            f"accuracy {found}; {result.steps} steps of {result.ms_per_step:,.0f} ms",
            f"entries of the word table that a step changes {result.entries:,.0f}, "
            f"gradient size reduction {result.reduction:,.1f}x",
            result.statement,
        ]
    )


def main(arguments: list[str]) -> int:
    """Loads, trains, judges and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    try:
        result = train(config, _run(config), _EXPORT.value, command.say)
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(result))
    if config.method != NON_PRIVATE:
        print(f"report: {Path(config.report.directory) / 'report.html'}")
    if _EXPORT.value:
        print(f"export: {_EXPORT.value}")
    return 0


def _run(config: ml_collections.ConfigDict) -> Run | None:
    """What a private run keeps to go on with; others begin anew."""
    if config.method != NON_PRIVATE:
        return Run(config, _RESUME.value, _MONITOR.value)
    if _RESUME.value or _MONITOR.value:
        raise ValueError(
            "Expected a private method with --resume or --monitor, got method='non_private'."
        )
    return None


if __name__ == "__main__":
    command.run(main)
