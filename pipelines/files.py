"""Files of jobs, written whole or not at all as the library writes its own, and locks."""

import fcntl
from pathlib import Path
from typing import IO

from dp_sparse.core import whole_file

__all__ = ["lock", "remove_unfinished", "whole_file"]


def remove_unfinished(path: Path) -> None:
    """Removes what processes that were killed wrote for `path`, and had not named yet.

    Beside a release that is drawn anew, such a file would tell more than one release does.
    """
    for unfinished in path.parent.glob(f".{path.name}.*.tmp"):
        unfinished.unlink()


def lock(path: Path) -> IO[bytes] | None:
    """An open local file that nobody else has, in this process or another; None if somebody has it.

    Its folder is made if it is missing. The lock ends when the file is closed, or with the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
