"""Prepares Criteo rows for training: TSV or gzip in, a file of fixed-width records out.

`X.records` holds one record of `schema.RECORD_DTYPE` per well-formed row, in the order of the
source file. The sidecar `X.records.json` says how many there are, how categories were hashed, and
how many rows were left out for which reason. Both are written under other names and then renamed,
so that a reader finds a complete pair or none. It reads the file once, at a few microseconds per
row, in memory that does not depend on its length.

`python -m pipelines.criteo.records SOURCE DESTINATION`
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from pipelines.criteo.lines import DAMAGE, line_blocks
from pipelines.criteo.parse import MAX_LINE_BYTES, REASONS, WELL_FORMED, Malformed, parse_lines
from pipelines.criteo.schema import RECORD_DTYPE, TABLE3_VOCABULARIES, validate_vocabularies
from pipelines.files import whole_file

_FORMAT = "criteo-records-1"


class PrepareError(ValueError):
    """A file cannot be prepared, or prepared data cannot be used."""


@dataclass(frozen=True)
class PreparedData:
    """A records file and what its sidecar says of it.

    Attributes:
        path: The records file.
        num_records: The number of records, one per well-formed row.
        vocabularies: The number of hash buckets of each categorical feature.
        quarantined: The number of malformed rows by reason, for reasons that occurred.
    """

    path: Path
    num_records: int
    vocabularies: tuple[int, ...]
    quarantined: dict[str, int]

    def records(self) -> "np.memmap[Any, np.dtype[np.void]]":
        """Maps the records into memory, read-only: [num_records] of `RECORD_DTYPE`."""
        return np.memmap(self.path, RECORD_DTYPE, mode="r", shape=(self.num_records,))


@dataclass
class Tally:
    """What has been read so far."""

    lines: int = 0
    records: int = 0
    quarantined: dict[Malformed, int] = field(default_factory=dict)
    first_lines: dict[Malformed, int] = field(default_factory=dict)

    def add(self, reasons: npt.NDArray[np.int8]) -> None:
        """Counts the outcome of the next lines."""
        for index in np.unique(reasons[reasons != WELL_FORMED]):
            held = np.flatnonzero(reasons == index)
            reason = REASONS[index]
            self.quarantined[reason] = self.quarantined.get(reason, 0) + len(held)
            self.first_lines.setdefault(reason, self.lines + int(held[0]) + 1)
        self.lines += len(reasons)
        self.records += int(np.count_nonzero(reasons == WELL_FORMED))

    def report(self) -> dict[str, dict[str, int | str]]:
        """The malformed rows: counts, reasons and first line numbers, nothing of their content."""
        return {
            reason: {
                "rows": self.quarantined[reason],
                "first_line": self.first_lines[reason],
                "meaning": reason.meaning,
            }
            for reason in REASONS
            if reason in self.quarantined
        }


def prepare(
    source: Path,
    destination: Path,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    progress: bool = True,
) -> PreparedData:
    """Writes `destination` and its sidecar from the rows of `source`, replacing what was there.

    Malformed rows are counted by reason and left out. A failure leaves `destination` as it was.

    Args:
        source: Tab-separated rows, plain or gzip-compressed; the file name does not matter.
        destination: The records file to write; the sidecar is named `destination` + ".json".
        vocabularies: The number of hash buckets of each of the 26 categorical features.
        progress: Whether to show a progress bar.

    Raises:
        PrepareError: The source file is missing, empty, damaged or without a well-formed row, or a
            vocabulary is out of range.
    """
    source, destination = Path(source), Path(destination)
    sizes = _checked_vocabularies(vocabularies)
    _check_paths(source, destination)

    def write(output: IO[bytes]) -> Tally:
        return _write_records(source, output, sizes, progress)

    return write_pair(destination, sizes, _fingerprint(source), write)


def write_pair(
    destination: Path,
    vocabularies: tuple[int, ...],
    source: dict[str, Any],
    write: Callable[[IO[bytes]], Tally],
) -> PreparedData:
    """Writes records and their sidecar, as a pair or not at all.

    Args:
        destination: The records file; the sidecar is beside it.
        vocabularies: By which categories are hashed.
        source: What the records are made of, for `is_current`.
        write: Writes all records to an open file, and counts them.
    """
    sidecar = _sidecar(destination)
    with whole_file(sidecar) as new_sidecar, whole_file(destination) as new_records:
        tally = write(new_records)
        description = {
            "format": _FORMAT,
            "num_records": tally.records,
            "record": RECORD_DTYPE.descr,
            "vocabularies": vocabularies,
            "quarantined": tally.report(),
            "source": source,
        }
        new_sidecar.write(f"{json.dumps(description, indent=1)}\n".encode())
        # Without a sidecar there is no prepared data. The block renames the records first and the
        # sidecar after them, so an old and a new file are never taken as a pair.
        sidecar.unlink(missing_ok=True)
    return load(destination)


def load(destination: Path) -> PreparedData:
    """Opens prepared data.

    Raises:
        PrepareError: A file is missing, or the records do not match the sidecar.
    """
    destination = Path(destination)
    description = _read_sidecar(destination)
    expected = description["num_records"] * RECORD_DTYPE.itemsize
    found = destination.stat().st_size if destination.is_file() else 0
    if found != expected:
        raise PrepareError(
            f"Expected {expected} bytes in {destination}, as its sidecar says, found {found}: "
            "prepare it again."
        )
    return PreparedData(
        path=destination,
        num_records=description["num_records"],
        vocabularies=tuple(description["vocabularies"]),
        quarantined={name: of["rows"] for name, of in description["quarantined"].items()},
    )


def is_current(
    source: Path, destination: Path, vocabularies: Sequence[int] = TABLE3_VOCABULARIES
) -> bool:
    """Whether `destination` holds what `prepare` would write, by the size and time of `source`."""
    try:
        return is_made_of(_fingerprint(source), destination, vocabularies)
    except FileNotFoundError:
        return False


def is_made_of(source: dict[str, Any], destination: Path, vocabularies: Sequence[int]) -> bool:
    """Whether `destination` holds records of this source, hashed by these vocabularies."""
    try:
        prepared = load(destination)
        found = _read_sidecar(Path(destination)).get("source")
        return prepared.vocabularies == tuple(vocabularies) and found == source
    except (PrepareError, FileNotFoundError):
        return False


def load_or_prepare(
    source: Path,
    destination: Path,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    progress: bool = True,
) -> PreparedData:
    """Prepares `source`, unless `destination` is current."""
    if is_current(source, destination, vocabularies):
        return load(destination)
    return prepare(source, destination, vocabularies, progress)


def prepared_in(
    directory: Path, source: Path, vocabularies: Sequence[int] = TABLE3_VOCABULARIES
) -> PreparedData:
    """The records of `source` under its name in `directory`, made unless they are current."""
    return load_or_prepare(source, directory / f"{source.name}.records", vocabularies)


def _checked_vocabularies(vocabularies: Sequence[int]) -> tuple[int, ...]:
    try:
        return validate_vocabularies(vocabularies)
    except ValueError as error:
        raise PrepareError(str(error)) from None


def _check_paths(source: Path, destination: Path) -> None:
    if not source.exists():
        raise PrepareError(f"No such file: {source}. Name a Criteo TSV file, plain or gzip.")
    if not source.is_file():
        raise PrepareError(f"Expected a file, got source={source}, which is not one.")
    if source.stat().st_size == 0:
        raise PrepareError(f"{source} is empty: it has no rows to prepare.")
    if destination.is_dir():
        raise PrepareError(f"Expected a file name, got destination={destination}, a directory.")
    for written in (destination, _sidecar(destination)):
        if written.exists() and written.samefile(source):
            raise PrepareError(f"destination={destination} would overwrite the source {source}.")


def _sidecar(destination: Path) -> Path:
    return destination.with_name(destination.name + ".json")


def _read_sidecar(destination: Path) -> dict[str, Any]:
    path = _sidecar(destination)
    try:
        description = json.loads(path.read_text())
    except FileNotFoundError:
        raise PrepareError(f"No prepared data at {destination}: {path} is missing.") from None
    except ValueError:
        description = None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise PrepareError(f"{path} is not a sidecar of format {_FORMAT}: prepare it again.")
    return description


def _fingerprint(source: Path) -> dict[str, int]:
    status = Path(source).stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _write_records(
    source: Path, output: IO[bytes], vocabularies: tuple[int, ...], progress: bool
) -> Tally:
    tally = Tally()
    try:
        for block in line_blocks(source, MAX_LINE_BYTES, progress):
            parsed = parse_lines(block, vocabularies)
            tally.add(parsed.reasons)
            output.write(parsed.records.tobytes())
    except DAMAGE as error:
        raise PrepareError(_damage(source, tally.lines, error)) from error
    if not tally.records:
        raise PrepareError(f"No row of {source} is well-formed: {_reasons(tally)}.")
    return tally


def _damage(source: Path, lines: int, error: BaseException) -> str:
    truncated = isinstance(error, EOFError)
    how, why = ("ends early", "truncated .gz") if truncated else ("is damaged", str(error))
    return f"{source} {how} after {lines} rows ({why}). Nothing was written; get the file again."


def _reasons(tally: Tally) -> str:
    return (
        "; ".join(
            f"{tally.quarantined[reason]} × {reason}, first in line {tally.first_lines[reason]}, "
            f"which {reason.meaning}"
            for reason in tally.quarantined
        )
        or "it has no rows"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Prepare Criteo rows as fixed-width records.")
    parser.add_argument("source", type=Path, help="a Criteo TSV file, plain or gzip")
    parser.add_argument("destination", type=Path, help="the records file to write")
    options = parser.parse_args(arguments)
    try:
        prepared = load_or_prepare(options.source, options.destination)
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{prepared.path}: {prepared.num_records} records")
    for reason, count in prepared.quarantined.items():
        print(f"quarantined: {count} × {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
