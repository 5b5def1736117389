"""The parser of Criteo rows: label TAB 13 integers TAB 26 hexadecimal categories, empty = missing.

`parse_line` is a pure function of one line and is the definition. `parse_lines` gives exactly the
same results for a block of lines, vectorised over its bytes, at a few microseconds per row;
`parse_raw_lines` gives the values before they are transformed and hashed. A malformed row gives a
result, and no exception: the first reason that is true of it, in the order of `Malformed`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pipelines.criteo.schema import (
    MISSING_CATEGORY,
    MISSING_COUNT,
    NUM_CATEGORIES,
    NUM_FIELDS,
    NUM_INTEGERS,
    RAW_DTYPE,
    records_from_raw,
)

MAX_LINE_BYTES = 4096  # the longest well-formed row has under 600


class Malformed(StrEnum):
    """Why a row cannot be used, in order of precedence."""

    LINE_TOO_LONG = "line_too_long"
    BAD_ENCODING = "bad_encoding"
    TOO_FEW_FIELDS = "too_few_fields"
    TOO_MANY_FIELDS = "too_many_fields"
    BAD_LABEL = "bad_label"
    BAD_INTEGER = "bad_integer"
    BAD_CATEGORY = "bad_category"

    @property
    def meaning(self) -> str:
        """What is wrong, in words that say nothing about the content of the row."""
        return _MEANINGS[self]


_MEANINGS = {
    Malformed.LINE_TOO_LONG: f"longer than {MAX_LINE_BYTES} bytes",
    Malformed.BAD_ENCODING: "has a byte that is neither printable ASCII nor a tab",
    Malformed.TOO_FEW_FIELDS: f"has fewer than {NUM_FIELDS} tab-separated fields",
    Malformed.TOO_MANY_FIELDS: f"has more than {NUM_FIELDS} tab-separated fields",
    Malformed.BAD_LABEL: "has a label other than 0 or 1",
    Malformed.BAD_INTEGER: "has a count that is not an integer of at most 18 digits",
    Malformed.BAD_CATEGORY: "has a category that is not 1 to 8 hexadecimal digits",
}
REASONS: tuple[Malformed, ...] = tuple(Malformed)
WELL_FORMED = -1

_MAX_DECIMALS = 18  # the most digits that always fit int64
_MAX_HEX = 8
_UNPRINTABLE = re.compile(rb"[^\t\x20-\x7e]")
_INTEGER = re.compile(rb"(-?[0-9]{1,%d})?" % _MAX_DECIMALS)
_CATEGORY = re.compile(rb"([0-9a-fA-F]{1,%d})?" % _MAX_HEX)
_TAB, _LINE_FEED, _CARRIAGE_RETURN, _MINUS = b"\t\n\r-"

_IS_UNPRINTABLE = np.array([_UNPRINTABLE.match(bytes([byte])) is not None for byte in range(256)])
_DIGIT_VALUES = np.full(256, 255, np.uint8)
_DIGIT_VALUES[list(b"0123456789abcdef")] = range(16)
_DIGIT_VALUES[list(b"ABCDEF")] = range(10, 16)


def parse_line(line: bytes, vocabularies: Sequence[int]) -> np.void | Malformed:
    """Parses one line, with or without its line end (LF or CRLF).

    Returns:
        A record of `RECORD_DTYPE`, or the reason why the row is malformed.
    """
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    fields = line.split(b"\t")
    integers, categories = fields[1 : 1 + NUM_INTEGERS], fields[1 + NUM_INTEGERS :]
    if reason := _why_malformed(line, fields):
        return reason
    counts = [int(field) if field else MISSING_COUNT for field in integers]
    values = [int(field, 16) if field else MISSING_CATEGORY for field in categories]
    raw = np.array([(int(fields[0]), counts, values)], RAW_DTYPE)
    record: np.void = records_from_raw(raw, vocabularies)[0]
    return record


def _why_malformed(line: bytes, fields: list[bytes]) -> Malformed | None:
    checks = {
        Malformed.LINE_TOO_LONG: len(line) > MAX_LINE_BYTES,
        Malformed.BAD_ENCODING: _UNPRINTABLE.search(line) is not None,
        Malformed.TOO_FEW_FIELDS: len(fields) < NUM_FIELDS,
        Malformed.TOO_MANY_FIELDS: len(fields) > NUM_FIELDS,
        Malformed.BAD_LABEL: fields[0] not in (b"0", b"1"),
        Malformed.BAD_INTEGER: not all(map(_INTEGER.fullmatch, fields[1 : 1 + NUM_INTEGERS])),
        Malformed.BAD_CATEGORY: not all(map(_CATEGORY.fullmatch, fields[1 + NUM_INTEGERS :])),
    }
    return next((reason for reason in REASONS if checks[reason]), None)


@dataclass(frozen=True)
class ParsedLines:
    """The result for a block of lines.

    Attributes:
        records: The well-formed rows, in the order of their lines.
        reasons: For each line, `WELL_FORMED` or the index of its reason in `REASONS`.
    """

    records: npt.NDArray[np.void]
    reasons: npt.NDArray[np.int8]


def parse_lines(block: bytes, vocabularies: Sequence[int]) -> ParsedLines:
    """Parses the lines of `block` to `RECORD_DTYPE`; the last one need not have a line end."""
    raw = parse_raw_lines(block)
    return ParsedLines(records_from_raw(raw.records, vocabularies), raw.reasons)


def parse_raw_lines(block: bytes) -> ParsedLines:
    """As `parse_lines`, to `RAW_DTYPE`: the values of the file."""
    # Padded, since digits are read at fixed offsets from the start of a field, also past its end.
    text = np.frombuffer(block + bytes(_MAX_DECIMALS + 2), np.uint8)
    starts, ends = _line_bounds(text, len(block))
    tabs = np.flatnonzero(text == _TAB)
    first_tabs = np.searchsorted(tabs, starts)
    num_fields = 1 + np.searchsorted(tabs, ends) - first_tabs
    reasons = np.full(len(starts), WELL_FORMED, np.int8)
    _mark(reasons, Malformed.LINE_TOO_LONG, ends - starts > MAX_LINE_BYTES)
    _mark(reasons, Malformed.BAD_ENCODING, _has_unprintable(text, starts, ends))
    _mark(reasons, Malformed.TOO_FEW_FIELDS, num_fields < NUM_FIELDS)
    _mark(reasons, Malformed.TOO_MANY_FIELDS, num_fields > NUM_FIELDS)

    rows = np.flatnonzero(reasons == WELL_FORMED)
    row_tabs = tabs[first_tabs[rows, None] + np.arange(NUM_FIELDS - 1)]  # [rows, 39]
    field_starts = np.concatenate([starts[rows, None], row_tabs + 1], axis=1)  # [rows, 40]
    field_ends = np.concatenate([row_tabs, ends[rows, None]], axis=1)
    records, row_reasons = _parse_fields(text, field_starts, field_ends)
    reasons[rows] = row_reasons
    return ParsedLines(records, reasons)


def _line_bounds(
    text: npt.NDArray[np.uint8], size: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where each line of text[:size] starts, and where it ends before its LF or CRLF."""
    ends = np.flatnonzero(text[:size] == _LINE_FEED)
    if size and text[size - 1] != _LINE_FEED:
        ends = np.append(ends, size)
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    # Before an empty line is a line feed or, at the start (index -1), the padding.
    carriage_return = text[ends - 1] == _CARRIAGE_RETURN
    return starts, ends - carriage_return


def _has_unprintable(
    text: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_]:
    places = np.flatnonzero(_IS_UNPRINTABLE[text])
    before = np.searchsorted(places, starts)
    return np.asarray(np.searchsorted(places, ends) > before)


def _mark(reasons: npt.NDArray[np.int8], reason: Malformed, holds: npt.NDArray[np.bool_]) -> None:
    """Gives `reason` to the rows for which it holds, or a field of which, and no earlier one."""
    of_row = holds if holds.ndim == 1 else holds.any(axis=1)
    reasons[of_row & (reasons == WELL_FORMED)] = REASONS.index(reason)


def _parse_fields(
    text: npt.NDArray[np.uint8], starts: npt.NDArray[np.intp], ends: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int8]]:
    """Reads fields bounded by `starts` and `ends` [rows, 40]; returns records and reasons."""
    reasons = np.full(len(starts), WELL_FORMED, np.int8)
    empty = starts == ends
    label, integer, category = slice(0, 1), slice(1, 1 + NUM_INTEGERS), slice(-NUM_CATEGORIES, None)
    labels, well_formed = _read_digits(text, starts[:, label], ends[:, label], 2, 1)
    _mark(reasons, Malformed.BAD_LABEL, ~well_formed | empty[:, label])

    negative = text[starts[:, integer]] == _MINUS
    digits = starts[:, integer] + negative
    counts, well_formed = _read_digits(text, digits, ends[:, integer], 10, _MAX_DECIMALS)
    bare_sign = negative & (digits == ends[:, integer])
    _mark(reasons, Malformed.BAD_INTEGER, ~well_formed | bare_sign)

    values, well_formed = _read_digits(text, starts[:, category], ends[:, category], 16, _MAX_HEX)
    _mark(reasons, Malformed.BAD_CATEGORY, ~well_formed)

    counts[negative] *= -1
    counts[empty[:, integer]] = MISSING_COUNT
    values[empty[:, category]] = MISSING_CATEGORY
    kept = reasons == WELL_FORMED
    records = np.empty(int(kept.sum()), RAW_DTYPE)
    records["label"], records["integers"] = labels[kept, 0], counts[kept]
    records["categories"] = values[kept]
    return records, reasons


def _read_digits(
    text: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.intp],
    ends: npt.NDArray[np.intp],
    base: int,
    max_digits: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Reads each text[start:end] as a number; an empty one is 0 and well-formed."""
    lengths = ends - starts
    well_formed = lengths <= max_digits
    values = np.zeros(starts.shape, np.int64)
    for place in range(min(int(lengths.max(initial=0)), max_digits)):
        inside = place < lengths
        digits = _DIGIT_VALUES[text[starts + place]]
        well_formed &= ~inside | (digits < base)
        values = np.where(inside, values * base + digits, values)
    return values, well_formed
