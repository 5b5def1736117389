"""What is wrong with a command line is said in a sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = (
    "criteo",
    "criteo.time_series",
    "glue",
    "images",
    "movielens",
    "movielens.study",
    "shakespeare",
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("job", JOBS)
def test_an_option_that_is_not_there_is_named(job: str) -> None:
    for option, named in (
        ("--config.data.pth=x", "pth"),
        ("--resumed", "resumed"),
        ("--config=configs/nowhere.py", "nowhere.py"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", f"pipelines.{job}", option],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert named in said
