"""A disk so small that it gets full: a file system of its own in memory, as root may mount one."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A folder on a file system of a given size.

    Args:
        path: An empty folder to mount it on.
        size: Bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))

    def resize(self, size: int) -> None:
        """As when somebody makes room; what is there stays."""
        _run("mount", "-o", f"remount,size={size}", str(self.path))

    def names(self) -> list[str]:
        """Everything on it, hidden files too."""
        return sorted(str(each.relative_to(self.path)) for each in self.path.rglob("*"))

    def names_of(self, folder: str) -> list[str]:
        """What is in a folder of it."""
        return sorted(each.name for each in (self.path / folder).iterdir())


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[SmallDisk]:
    """Mounts it, and unmounts it at the end; skips the test where nothing may be mounted."""
    path.mkdir()
    try:
        disk = SmallDisk(path, size)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs to mount a tmpfs: {error}")
    try:
        yield disk
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
