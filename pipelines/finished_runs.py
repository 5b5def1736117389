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
        of: What else the runs depend on, such as a digest of settings; a part of each line.

    Attributes:
        lines: What each line says, in their order.

    Raises:
        ValueError: The file has runs of something else.
    """

    def __init__(self, path: Path, of: str | None = None) -> None:
        self._path, self._of = path, {} if of is None else {"of": of}
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
            with whole_file(path) as file:
                file.write("".join(lines).encode())
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]
        others = sum(line.get("of") != of for line in self.lines)
        if others:
            raise ValueError(
                f"Expected runs of these settings and data in {path}, got {others} of others among "
                f"{len(lines)}: name another file for these results, and another page."
            )

    def add(self, line: dict[str, Any]) -> None:
        """Writes one line."""
        line = line | self._of
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
