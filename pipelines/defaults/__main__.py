"""Runs the study, or what of it is missing, and writes its page.

`python -m pipelines.defaults --config=configs/defaults.py --config.data.criteo=FILE
--config.data.movielens=FILE --config.data.mnist=FILE`
"""

from absl import app

from pipelines import command
from pipelines.defaults.study import run_study

_CONFIG = command.config_flag("configs/defaults.py", "The study.")


def main(arguments: list[str]) -> int:
    """Runs the study of the config."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    return run_study(_CONFIG.value)


if __name__ == "__main__":
    command.run(main)
