"""Files that are written whole or not at all, beside their place and renamed into it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file to write bytes, which replaces `path` when the block ends.

    A block that raises leaves what stood at `path`, and no other file. Processes that write one
    path at a time do not meet: the last one to end replaces what the others wrote.

    Args:
        path: In a folder that exists.

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
