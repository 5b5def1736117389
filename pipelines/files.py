"""Files of jobs, written whole or not at all as the library writes its own, and locks."""

import errno
import shutil
from pathlib import Path
from typing import IO

from dp_sparse.core import StateFile, exclusive, whole_file

__all__ = ["StateFile", "lock", "only_one", "require_disk", "state_file", "whole_file"]


def state_file(path: Path) -> StateFile:
    """A JSON file in the folder of a run, which reads and writes it; damage is an error."""
    return StateFile(path, "Restore it, or begin in another folder, which spends again.")


def require_disk(folder: Path, needed: float, what: str) -> None:
    """Raises OSError, before anything is written, if a disk has not so many bytes free.

    Args:
        folder: On the disk; it need not exist.
        needed: Bytes that will be written, about.
        what: Says what they are, such as "100,000,000 rows".
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"Expected {_size(needed)} free for {what}, got {_size(free)}: free some, or write to "
            "another disk",
            str(folder),
        )


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"


def lock(path: Path) -> IO[str] | None:
    """`exclusive`, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return exclusive(path)


def only_one(directory: Path) -> IO[str]:
    """Keeps other runs out of a directory as long as the file is open.

    What is made once and paid once, such as selected rows, two of them would make twice.

    Raises:
        ValueError: Another run is there.
    """
    held = lock(directory / "lock")
    if held is None:
        raise ValueError(
            f"Expected nobody else in {directory}, got a run that has not ended: wait until its "
            "process is gone, or name another directory."
        )
    return held
