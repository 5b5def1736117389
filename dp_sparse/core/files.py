"""Files that are written whole or not at all: under another name first, and then renamed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file to write bytes, which replaces `path` when the block ends.

    If the block raises, `path` stays as it was, and no other file remains. Several processes may
    write the same path: each writes a file of its own, and the last one to end replaces the others.

    Args:
        path: A file in a folder that exists.

    Raises:
        OSError: The folder is missing, or cannot be written to.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
