"""A Python file that describes an audit, for the command line."""

import os
import runpy
from pathlib import Path

from dp_sparse.auditing.audit import Audit


def audit_of(path: str | os.PathLike[str]) -> Audit:
    """What `get_audit()` of a file gives.

    Args:
        path: A Python file, which is run.

    Raises:
        ValueError: There is no such file, or no such function in it, or it gives something else.

    Examples:
        >>> from dp_sparse import auditing
        >>> auditing.audit_of("none.py")
        Traceback (most recent call last):
            ...
        ValueError: Expected a Python file with a function get_audit(), got no file none.py.
    """
    if not Path(path).is_file():
        raise ValueError(f"Expected a Python file with a function get_audit(), got no file {path}.")
    get_audit = runpy.run_path(str(path)).get("get_audit")
    if not callable(get_audit):
        raise ValueError(f"Expected a function get_audit() in {path}, got {get_audit!r}.")
    audit = get_audit()
    if not isinstance(audit, Audit):
        raise ValueError(f"Expected get_audit() of {path} to return a dp_sparse.Audit: {audit!r}.")
    return audit
