"""The files of days in their order, the periods that they make, and days cut from one file."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from pipelines.criteo.records import PrepareError
from pipelines.criteo.shards import blocks_of
from pipelines.files import whole_file


@dataclass(frozen=True)
class Period:
    """Consecutive days between two updates of the model.

    Attributes:
        number: Which period, from 0.
        days: The numbers of its days, those of their files.
        files: A file of rows for each day.
    """

    number: int
    days: range
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """For reports and statements."""
        first, last = self.days[0], self.days[-1]
        return f"day {first}" if first == last else f"days {first} to {last}"


def day_files(pattern: str) -> list[Path]:
    """The files that a pattern names, in the order of the last number in their names.

    Args:
        pattern: Such as "criteo/day_*.gz".

    Raises:
        PrepareError: No file, a name without a number, a number twice or missing between others, or
            an empty file.
    """
    found = [Path(path) for path in glob(pattern)]
    if not found:
        raise PrepareError(
            f"Expected a file for each day, got none for data.days={pattern!r}: name them as in "
            "--config.data.days='FOLDER/day_*.gz'."
        )
    numbered: dict[int, Path] = {}
    for path in sorted(found):
        number = _number(path)
        if number in numbered:
            raise PrepareError(
                f"Expected one file for each day, got {numbered[number]} and {path} for day "
                f"{number}: leave one out of the pattern."
            )
        numbered[number] = path
    days = range(min(numbered), max(numbered) + 1)
    missing = [day for day in days if day not in numbered]
    if missing:
        raise PrepareError(
            f"Expected a file for each of the days {days[0]} to {days[-1]}, got none for day "
            f"{missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''} in {pattern}."
        )
    files = [numbered[day] for day in days]
    for path in files:
        if path.stat().st_size == 0:
            raise PrepareError(f"{path} is empty: a day without rows cannot be trained on.")
    return files


def _number(path: Path) -> int:
    numbers = re.findall(r"\d+", path.name)
    if not numbers:
        raise PrepareError(
            f"Expected the number of its day in the name of {path}, such as day_3.tsv.gz."
        )
    return int(numbers[-1])


def periods_of(files: Sequence[Path], length: int) -> list[Period]:
    """The days in periods of `length` days; the last one may be shorter.

    Args:
        files: As `day_files` gives them, or a part of that.
        length: Days of a period.

    Raises:
        ValueError: `length` is not positive, or there are fewer days.
    """
    if not 1 <= length <= len(files):
        raise ValueError(
            f"Expected 1 <= period <= {len(files)}, the days of training, got period={length}."
        )
    parts = [tuple(files[start : start + length]) for start in range(0, len(files), length)]
    firsts = [_number(part[0]) for part in parts]
    return [
        Period(number, range(first, first + len(part)), part)
        for number, (first, part) in enumerate(zip(firsts, parts, strict=True))
    ]


def cut_into_days(source: Path, folder: Path, days: int) -> list[Path]:
    """Cuts the lines of one file, in their order, into `days` files of equal length.

    The first files get a line more where it does not divide. The source is read twice.

    Raises:
        PrepareError: The file has fewer lines than days, or is damaged.
    """
    total = sum(1 for _ in _lines(source))
    if not 1 <= days <= total:
        raise PrepareError(f"Expected 1 <= days <= {total}, the lines of {source}, got {days}.")
    lines, paths = _lines(source), []
    for day in range(days):
        path = folder / f"day_{day:02d}.tsv"
        with whole_file(path) as file:
            for _ in range(total * (day + 1) // days - total * day // days):
                file.write(next(lines) + b"\n")
        paths.append(path)
    return paths


def _lines(source: Path) -> Iterator[bytes]:
    """Without their ends. A carriage return within a line is a part of it."""
    for block in blocks_of(str(source)):
        for line in block.removesuffix(b"\n").split(b"\n"):
            yield line.removesuffix(b"\r")
