"""A function in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.own_process import in_own_process
from tests.subprocesses import HANG


def test_it_returns_and_raises_what_the_function_does_from_another_process() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="invalid literal"):
        in_own_process(int, "x")


def waiting(path: Path) -> None:
    """Says which process it is, and never ends by itself."""
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    while True:
        time.sleep(1)


_PARENT = """
import pathlib, sys
from pipelines.own_process import in_own_process
from tests.pipelines.test_own_process import waiting
if __name__ == "__main__":
    in_own_process(waiting, pathlib.Path(sys.argv[1]))
"""


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script, path = tmp_path / "parent.py", tmp_path / "child"
    script.write_text(_PARENT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, script, path], env=environment)
    try:
        until(path.exists)
    finally:
        parent.kill()
        parent.wait()
    child = int(path.read_text())
    until(lambda: not runs(child))


def runs(process: int) -> bool:
    """Whether there is such a process that is no zombie, which nobody may have waited for."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


def until(done: Callable[[], bool]) -> None:
    """Waits for it."""
    end = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)
