"""Runs a piece of Python in a process of its own, or in a fork of this one."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[1]
HANG = 1800.0  # seconds after which a process hangs, and is not slow, however busy the machine is


def environment(packages: pathlib.Path = ROOT) -> dict[str, str]:
    """This process' own, with `packages` before what is installed."""
    return {
        **os.environ,
        "PYTHONPATH": str(packages),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts it; standard output is a pipe, standard error is dropped."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def run_python(code: str, *arguments: str, packages: pathlib.Path = ROOT) -> str:
    """Runs it to its end and returns what it printed; fails with its last words when it failed.

    The folder it runs in is `packages`, from which it imports before what is installed.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=packages,
        env=environment(packages),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def in_fork(what: Callable[[], bytes]) -> bytes:
    """What it returns in a fork of this process, where TensorFlow has no threads for graphs."""
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(HANG))
        try:
            os.write(here, what())
        finally:
            os._exit(0)  # nothing of pytest may go on in here
    os.close(here)
    with open(there, "rb") as sent:
        found = sent.read()
    os.waitpid(child, 0)
    assert found
    return found
