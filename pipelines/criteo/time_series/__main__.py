"""Trains day by day.

`python -m pipelines.criteo.time_series --config configs/criteo_time_series.py
--config.data.days='FOLDER/day_*.gz'`; with `--resume`, a run that was stopped goes on.
"""

import math
import sys
from pathlib import Path

from absl import app, flags

from pipelines import command
from pipelines.criteo.time_series.train import Run, TimeSeriesResult
from pipelines.files import state_file
from pipelines.runs import REFUSALS, difference, settings_of

_SETTINGS = "config.json"
_MAY_CHANGE = ("verbose", "data.beam")

_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in `config.directory`.")
_CONFIG = command.config_flag("configs/criteo_time_series.py", "The experiment.")


def main(arguments: list[str]) -> int:
    """Prepares, trains, evaluates and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config, folder = _CONFIG.value, Path(_CONFIG.value.directory)
    try:
        settings = settings_of(config, _MAY_CHANGE)
        _check_folder(folder, settings)
        run = Run.of(config, folder)
        _check_folder(folder, settings)  # once more, now that nobody else is there
        state_file(folder / _SETTINGS).write(settings)  # from now on a run has begun here
        result = run.result()
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _report(result, folder)
    return 0


def _check_folder(folder: Path, settings: dict[str, str]) -> None:
    """Raises ValueError unless a run with these settings may begin here, or go on."""
    begun = state_file(folder / _SETTINGS)
    if not begun.exists():
        return
    if not _RESUME.value:
        raise ValueError(
            f"Expected a new folder, got directory={folder}, in which a run has begun: pass "
            "--resume to go on with it, or name another folder."
        )
    changed = difference(begun.read(dict), settings)
    if changed is not None:
        raise ValueError(
            f"Expected the config with which the run in {folder} was begun, got {changed}: go on "
            "with its own, or use another --config.directory."
        )


def _report(result: TimeSeriesResult, folder: Path) -> None:
    for name, auc in result.curve:
        print(f"after {name}: AUC {auc:.4f}")
    print(f"log loss {result.log_loss:.4f}, mean prediction {result.mean_prediction:.4f}")
    print(f"{result.steps} steps; gradients {result.reduction:.1f} times smaller than the tables")
    print(result.statement)
    described = {
        "auc": result.auc,
        "log_loss": result.log_loss,
        "mean_prediction": result.mean_prediction,
        "curve": result.curve,
        "epsilon": result.epsilon if math.isfinite(result.epsilon) else None,
        "delta": result.delta,
        "reduction": result.reduction,
        "steps": result.steps,
        "statement": result.statement,
    }
    state_file(folder / "result.json").write(described)


if __name__ == "__main__":
    command.run(main)
