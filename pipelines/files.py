"""Files of jobs, written whole or not at all as the library writes its own, and locks."""

from pathlib import Path
from typing import IO

from dp_sparse.core import exclusive, whole_file

__all__ = ["lock", "remove_unfinished", "whole_file"]


def remove_unfinished(path: Path) -> None:
    """Removes what processes that were killed wrote for `path`, and had not named yet.

    Beside a release that is drawn anew, such a file would tell more than one release does.
    """
    for unfinished in path.parent.glob(f".{path.name}.*.tmp"):
        unfinished.unlink()


def lock(path: Path) -> IO[str] | None:
    """`exclusive`, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return exclusive(path)
