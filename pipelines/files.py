"""Files that are written whole or not at all, and locks that end with their process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file to write bytes, which replaces `path` when the block ends.

    Makes the folder if it is missing, and is on the disk when it returns. If the block raises,
    `path` stays as it was, and no other file remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


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
