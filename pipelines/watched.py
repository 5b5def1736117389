"""A command with its time, memory and disk, which is killed once on its way and given again.

What was measured is kept in a file all along: the time of a process that was stopped counts.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pipelines.files import state_file

_SECONDS = 1.0  # between two looks
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Watched:
    """What a part of a job takes.

    Args:
        folder: For what is measured and for the command's output.
        name: Of the part.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = name.replace(" ", "_")
        self._file = state_file(folder / f"{name}.json")
        self._printed, self._errors = folder / f"{name}.txt", folder / f"{name}.errors"
        self._state: dict[str, Any] = {"seconds": 0.0, "memory": 0, "killed_after": None}
        if self._file.exists():
            self._state = self._file.read(dict)

    def own_time(self, parts: Iterable[Any]) -> None:
        """Counts the time of what this process does, after each part that is done."""
        last = time.monotonic()
        for _ in parts:
            now = time.monotonic()
            self._state["seconds"], last = self._state["seconds"] + now - last, now
            self._file.write(self._state)

    def run(self, command: Sequence[str], kill: Callable[[], bool]) -> str:
        """What a module's command printed when it ended by itself.

        Args:
            command: The module and its arguments.
            kill: Whether it is time to kill the command and all its processes, which is done once.

        Raises:
            OSError: It failed; the error has its last line of errors, and the file of all of them.
        """
        while True:
            status, killed = self._once(command, kill)
            if killed:
                continue
            if status:
                last = self._errors.read_text().strip().splitlines()[-1:]
                raise OSError(f"{command[0]} failed: {' '.join(last)} ({self._errors})")
            return self._printed.read_text()

    def _once(self, command: Sequence[str], kill: Callable[[], bool]) -> tuple[int, bool]:
        with self._printed.open("w") as printed, self._errors.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=printed,
                stderr=errors,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                start_new_session=True,  # so that all its processes are found and killed
            )
            try:
                return self._watch(process, kill)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _watch(
        self, process: subprocess.Popen[bytes], kill: Callable[[], bool]
    ) -> tuple[int, bool]:
        last = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS)
            now = time.monotonic()
            self._state["seconds"], last = self._state["seconds"] + now - last, now
            self._state["memory"] = max(self._state["memory"], _memory(process.pid))
            if process.returncode is not None:
                self._file.write(self._state)
                return process.returncode, False
            if self._state["killed_after"] is None and kill():
                self._state["killed_after"] = self._state["seconds"]
                self._file.write(self._state)
                return 0, True
            self._file.write(self._state)

    def found(self, output: Path) -> dict[str, Any]:
        """What it took: seconds, peak memory and bytes on the disk, and when it was killed."""
        files = [path for path in output.rglob("*") if path.is_file()]
        return {**self._state, "disk": sum(path.stat().st_size for path in files)}


def _memory(session: int) -> int:
    """Bytes that all processes of a session have for themselves, without pages of files."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(int(folder.name)) == session:
                resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
                total += (resident - shared) * _PAGE
    return total
