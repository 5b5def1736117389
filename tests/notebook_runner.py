"""Runs the code cells of a notebook in one namespace, as Jupyter would, and then checks claims.

    python -m tests.notebook_runner NOTEBOOK [CLAIM ...]

A claim is an expression of the notebook's variables. Cells may use no network, and write nothing
outside of the working folder, of which HOME and TMPDIR should be part. What this process does
through Python is seen; what TensorFlow, h5py or other processes do by themselves is not.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod"}
_NETWORK = {
    f"socket.{call}"
    for call in ("connect", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr")
}


class Guard:
    """An audit hook; it raises an error, and keeps what was tried for a cell that catches it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tried = folder.resolve(), list[str]()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _NETWORK or self._is_outside(event, arguments):
            self.tried.append(f"{event}{arguments}")
            raise RuntimeError(f"A notebook may not do this: {self.tried[-1]}")

    def _is_outside(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            paths = [path] if isinstance(flags, int) and flags & _WRITES else []
        else:
            paths = list(arguments[:2]) if event in _CHANGES else []
        named = {os.fsdecode(p) for p in paths if isinstance(p, str | bytes | os.PathLike)}
        named.discard(os.devnull)
        return not all(Path(path).resolve().is_relative_to(self.folder) for path in named)


def code_cells(notebook: Path) -> list[tuple[int, str]]:
    """The place of each code cell, and its text."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(i, "".join(c["source"])) for i, c in enumerate(cells) if c["cell_type"] == "code"]


def main(notebook: str, *claims: str) -> None:
    """Exits with an error if a cell or a claim fails, or a cell tried what it may not do."""
    cells = code_cells(Path(notebook))
    sys.dont_write_bytecode = True
    names: dict[str, Any] = {"__name__": "__main__"}
    guard = Guard(Path.cwd())
    sys.addaudithook(guard)
    for place, text in cells:
        exec(compile(text, f"{notebook}: cell {place}", "exec"), names)
    false = [claim for claim in claims if not eval(claim, names)]
    shown = {name: value for name, value in names.items() if isinstance(value, float)}
    print(f"numbers: {shown}")
    if false or guard.tried:
        raise SystemExit(f"false: {false}; tried: {guard.tried}; numbers: {shown}")


if __name__ == "__main__":
    main(*sys.argv[1:])
