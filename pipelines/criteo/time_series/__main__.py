"""Trains day by day.

`python -m pipelines.criteo.time_series --config configs/criteo_time_series.py
--config.data.days='FOLDER/day_*.gz'`; with `--resume`, a run that was stopped goes on.
"""

import json
import math
import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from pipelines.criteo.time_series.train import TimeSeriesResult, train
from pipelines.files import whole_file

_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in `config.directory`.")
_CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/criteo_time_series.py", "The experiment."
)


def main(arguments: list[str]) -> int:
    """Prepares, trains, evaluates and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config, folder = _CONFIG.value, Path(_CONFIG.value.directory)
    settings = folder / "config.json"
    described = config.to_json(sort_keys=True)
    try:
        if settings.exists() and not _RESUME.value:
            raise ValueError(
                f"Expected a new folder, got directory={folder}, in which a run has begun: pass "
                "--resume to go on with it, or name another folder."
            )
        if settings.exists() and settings.read_text() != described:
            raise ValueError(
                f"Expected the config with which the run in {folder} was begun, got another one: "
                f"it is in {settings}."
            )
        with whole_file(settings) as file:
            file.write(described.encode())
        result = train(config, folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _report(result, folder)
    return 0


def _report(result: TimeSeriesResult, folder: Path) -> None:
    for name, auc in result.curve:
        print(f"after {name}: AUC {auc:.4f}")
    print(f"{result.steps} steps; gradients {result.reduction:.1f} times smaller than the tables")
    print(result.statement)
    described = {
        "auc": result.auc,
        "curve": result.curve,
        "epsilon": result.epsilon if math.isfinite(result.epsilon) else None,
        "delta": result.delta,
        "reduction": result.reduction,
        "steps": result.steps,
        "statement": result.statement,
    }
    with whole_file(folder / "result.json") as file:
        file.write(json.dumps(described, indent=1).encode())


if __name__ == "__main__":
    app.run(main)
