"""The results file of a study: a line of JSON for each run, written as soon as it has ended."""

import json
from pathlib import Path
from typing import Any

from pipelines.files import whole_file


class FinishedRuns:
    """The runs of a study that have ended, so that the same command does the rest.

    A line that was cut off while it was written is removed: its run has not ended.

    Args:
        path: The file; it need not exist.

    Attributes:
        lines: What each line says, in their order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
            with whole_file(path) as file:
                file.write("".join(lines).encode())
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def add(self, line: dict[str, Any]) -> None:
        """Writes one line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
