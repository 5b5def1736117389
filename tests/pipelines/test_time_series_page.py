"""The example and the commands of docs/time_series.md run as printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import dp_sparse
from pipelines.criteo import generate
from tests.subprocesses import HANG

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "time_series.md").read_text()


def test_the_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    days = {
        day: ({"users": rng.integers(0, 100, 500)}, rng.random(500, np.float32))
        for day in ("Monday", "Tuesday")
    }
    users = keras.Input((), dtype="int32", name="users")
    rated = keras.layers.Dense(1)(keras.layers.Embedding(100, 4, name="users_table")(users))
    names = {
        "dp_sparse": dp_sparse,
        "keras": keras,
        "days": {
            d: ({"users": x["users"], "users_table": x["users"]}, y) for d, (x, y) in days.items()
        },
        "tables": {"users_table": 100},
        "budget": dp_sparse.PrivacyBudget(8.0, 1e-4),
        "histograms": [],
        "model": keras.Model({"users": users}, rated),
    }
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, names)
    said = capsys.readouterr().out
    assert "Training on 2 disjoint parts" in said
    assert "sum of" in said and "noisy histogram" in said


@pytest.mark.slow
def test_the_commands_run_as_printed(tmp_path: Path) -> None:
    """On fewer days and rows; the second one finds that the first one has ended."""
    assert generate.main(["--days", "20", "--rows", "60", "--out", str(tmp_path / "days")]) == 0
    commands = re.findall(r"^python -m (pipelines\.criteo\.time_series .*)$", PAGE, re.M)
    assert len(commands) == 2
    for line in commands:
        small = ["--config.period=9", "--config.training.batch_size=50"]
        arguments = [a.replace("configs/", f"{ROOT}/configs/") for a in shlex.split(line)]
        done = subprocess.run(
            [sys.executable, "-m", *arguments, *small],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
        assert "after days 9 to 17: AUC" in done.stdout
