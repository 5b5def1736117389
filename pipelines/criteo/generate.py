"""Generates click rows in the shape of the Criteo data, with labels from a planted model.

`planted_rows` says what they are. The same seed gives the same bytes, a longer file begins with the
shorter one, and memory is bounded.

With `--days D`, the rows are of D days, each in a file of its own, and the world drifts from day to
day (`Drift`): popular categories are replaced by new ones, and what values mean for a click turns.

`python -m pipelines.criteo.generate --rows N --out FILE --seed S`, or with `--days D`, N rows a day
and a FOLDER as `--out`.
"""

import argparse
import gzip
import io
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from pipelines.criteo.planted_rows import (
    MAX_DIGITS,
    MISSING,
    NO_DRIFT,
    Drift,
    GeneratedRows,
    generated_rows,
)
from pipelines.criteo.schema import NUM_CATEGORIES, TABLE3_VOCABULARIES
from pipelines.files import require_disk, whole_file

_PLAIN, _PACKED = 244, 90  # bytes of a row, about


def generate(
    rows: int,
    out: Path,
    seed: int = 0,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    zipf_exponent: float = 1.1,
    progress: bool = True,
    drift: Drift = NO_DRIFT,
) -> None:
    """Writes `rows` tab-separated rows to `out`, compressed if its name ends in .gz.

    A failure leaves `out` as it was.

    Args:
        rows: The number of rows.
        out: The file to write.
        seed: What determines every byte, together with the other arguments.
        vocabularies: The number of categories of each of the 26 features.
        zipf_exponent: Frequencies fall as 1 / (1 + rank)**zipf_exponent.
        progress: Whether to show a progress bar.
        drift: Of which day.

    Raises:
        ValueError: If an argument is out of range.
        OSError: The disk has no room for the rows.
    """
    if isinstance(rows, int):  # a wrong number is told below
        size = _PACKED if out.name.endswith(".gz") else _PLAIN
        require_disk(out.parent, rows * size, f"{rows:,} rows")
    chunks = generated_rows(rows, seed, vocabularies, zipf_exponent, drift)
    bar = tqdm(total=rows, unit="row", unit_scale=True, desc=out.name, disable=not progress)
    with bar, whole_file(out) as raw, _compressor(out, raw) as output:
        for chunk in chunks:
            output.write(encode(chunk))
            bar.update(len(chunk.labels))


def generate_days(
    days: int,
    rows: int,
    folder: Path,
    seed: int = 0,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    renewal: float = NO_DRIFT.renewal,
    turn: float = NO_DRIFT.turn,
    progress: bool = True,
) -> list[Path]:
    """Writes `folder`/day_00.tsv.gz and so on, each of `rows` rows; returns their paths.

    Raises:
        ValueError: If an argument is out of range.
    """
    if days < 1:
        raise ValueError(f"Expected days >= 1, got days={days}.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"day_{day:02d}.tsv.gz" for day in range(days)]
    for day, path in enumerate(paths):
        drift = Drift(day, renewal, turn)
        generate(rows, path, seed, vocabularies, progress=progress, drift=drift)
    return paths


def encode(rows: GeneratedRows) -> bytes:
    """Returns the rows as lines of text.

    They are written into fixed-width fields padded with zero bytes, which are then removed.
    """
    columns = [
        (rows.labels + ord("0")).astype(np.uint8)[:, None, None],
        np.where(rows.count_missing[..., None], 0, _decimal(rows.counts)),
        np.where(rows.ranks[..., None] == MISSING, 0, _hexadecimal(rows.codes)),
    ]
    separated = [np.insert(field, field.shape[-1], ord("\t"), axis=-1) for field in columns]
    text = np.concatenate([field.reshape(len(field), -1) for field in separated], axis=1)
    text[:, -1] = ord("\n")
    return bytes(text[text != 0])


def _hexadecimal(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """The 8 digits of each category, [rows, 26, 8]; distinct for distinct codes."""
    # The finaliser of MurmurHash3 is a bijection of 32 bits; the digits look like Criteo's.
    mixed = (codes ^ (codes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> np.uint32(16))
    pairs = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)
    octets = np.ascontiguousarray(mixed.astype(">u4")).view(np.uint8)  # [rows, 104]
    return pairs[octets].view(np.uint8).reshape(len(codes), NUM_CATEGORIES, 8)


def _decimal(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The sign and the digits of each count, padded with zero bytes, [rows, 13, 9]."""
    text = np.zeros((*counts.shape, 1 + MAX_DIGITS), np.uint8)
    text[..., 0] = np.where(counts < 0, ord("-"), 0)
    remaining = np.abs(counts).astype(np.uint32)
    for position in range(MAX_DIGITS, 0, -1):
        shown = (remaining > 0) | (position == MAX_DIGITS)
        remaining, digits = np.divmod(remaining, np.uint32(10))
        text[..., position] = np.where(shown, digits + ord("0"), 0)
    return text


def _compressor(out: Path, raw: io.BufferedWriter) -> AbstractContextManager[io.BufferedIOBase]:
    if out.suffix != ".gz":
        return nullcontext(raw)
    # Neither a name nor a time in the header: the same rows give the same bytes.
    return gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Generate click rows in the shape of Criteo.")
    parser.add_argument("--rows", type=int, required=True, help="how many")
    parser.add_argument("--out", type=Path, required=True, help="a .tsv or .tsv.gz file to write")
    parser.add_argument("--seed", type=int, default=0, help="what determines every byte")
    parser.add_argument("--days", type=int, help="files of as many rows, in a folder; they drift")
    options = parser.parse_args(arguments)
    try:
        if options.days is None:
            generate(options.rows, options.out, options.seed)
        else:
            generate_days(options.days, options.rows, options.out, options.seed)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
