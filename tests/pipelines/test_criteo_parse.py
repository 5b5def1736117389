"""The parser: what it accepts, what it says of the rest, and that both forms of it agree."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.criteo import parse, schema
from pipelines.criteo.parse import Malformed, parse_line, parse_lines

VOCABULARIES = schema.TABLE3_VOCABULARIES
ROW = b"\t".join([b"1", *[b"%d" % n for n in range(13)], *[b"%08x" % n for n in range(26)]])


def with_field(position: int, field: bytes) -> bytes:
    """ROW with one field replaced."""
    fields = ROW.split(b"\t")
    fields[position] = field
    return b"\t".join(fields)


def outcomes(block: bytes) -> list[bytes | Malformed]:
    """What parse_lines says of each line, in the terms of parse_line."""
    parsed = parse_lines(block, VOCABULARIES)
    records = iter(parsed.records)
    found: list[bytes | Malformed] = [
        next(records).tobytes() if code == parse.WELL_FORMED else parse.REASONS[code]
        for code in parsed.reasons
    ]
    assert next(records, None) is None
    return found


def outcome(line: bytes) -> bytes | Malformed:
    """What parse_line says, with a record as its bytes."""
    parsed = parse_line(line, VOCABULARIES)
    return parsed if isinstance(parsed, Malformed) else parsed.tobytes()


def test_values_of_a_row() -> None:
    record = parse_line(ROW, VOCABULARIES)
    assert isinstance(record, np.void)
    assert record.dtype == schema.RECORD_DTYPE
    assert record["label"] == 1
    np.testing.assert_array_equal(record["integers"], schema.log_transform(np.arange(13)))
    values = np.arange(26, dtype=np.uint64)[None]
    np.testing.assert_array_equal(
        record["categories"], schema.category_buckets(values, VOCABULARIES)[0]
    )


def test_missing_values() -> None:
    record = parse_line(b"0" + b"\t" * 39, VOCABULARIES)
    assert isinstance(record, np.void)
    assert not record["integers"].any()
    missing = np.full((1, 26), schema.MISSING_CATEGORY, np.uint64)
    np.testing.assert_array_equal(
        record["categories"], schema.category_buckets(missing, VOCABULARIES)[0]
    )


@pytest.mark.parametrize("spelling", [b"00ABCDEF", b"00abcdef", b"abcdef", b"AbCdEf"])
def test_spellings_of_a_category(spelling: bytes) -> None:
    assert outcome(with_field(20, spelling)) == outcome(with_field(20, b"00abcdef"))


@pytest.mark.parametrize("integer", [b"-0", b"-1", b"-3", b"0", b"000", b""])
def test_counts_that_are_zero(integer: bytes) -> None:
    record = parse_line(with_field(5, integer), VOCABULARIES)
    assert isinstance(record, np.void)
    assert record["integers"][4] == 0


MALFORMED = [
    (b"", Malformed.TOO_FEW_FIELDS),
    (b" ", Malformed.TOO_FEW_FIELDS),
    (ROW.rpartition(b"\t")[0], Malformed.TOO_FEW_FIELDS),
    (ROW.replace(b"\t", b","), Malformed.TOO_FEW_FIELDS),
    (ROW + b"\t", Malformed.TOO_MANY_FIELDS),
    (ROW + b"\t" + ROW, Malformed.TOO_MANY_FIELDS),
    *((with_field(0, label), Malformed.BAD_LABEL) for label in (b"", b"2", b"01", b"-1", b"1.0")),
    (with_field(0, b"label"), Malformed.BAD_LABEL),
    *(
        (with_field(position, integer), Malformed.BAD_INTEGER)
        for position in (1, 7, 13)
        for integer in (b"-", b"+1", b"1.5", b"1e3", b" 1", b"1 ", b"--1", b"1-", b"a", b"1" * 19)
    ),
    *(
        (with_field(position, category), Malformed.BAD_CATEGORY)
        for position in (14, 39)
        for category in (b"123456789", b"0x1f", b"g", b"-1", b" 1f", b"1f ")
    ),
    (with_field(39, b"1\r"), Malformed.BAD_ENCODING),
    (with_field(20, "é".encode()), Malformed.BAD_ENCODING),
    (with_field(20, b"\x00"), Malformed.BAD_ENCODING),
    (with_field(20, b"\xff\xfe"), Malformed.BAD_ENCODING),
    (with_field(20, b"1" * 4096), Malformed.LINE_TOO_LONG),
    (with_field(20, b"\x00" * 4096), Malformed.LINE_TOO_LONG),
]


@pytest.mark.parametrize(("line", "reason"), MALFORMED)
def test_malformed_lines(line: bytes, reason: Malformed) -> None:
    assert outcome(line + b"\r\n") is reason
    assert outcomes(ROW + b"\n" + line + b"\r\n" + ROW) == [outcome(ROW), reason, outcome(ROW)]


def test_every_reason_is_met_above_and_has_a_meaning() -> None:
    assert {reason for _, reason in MALFORMED} == set(Malformed)
    assert all(reason.meaning for reason in Malformed)


def test_several_faults_have_the_first_reason() -> None:
    line = b"\t".join([b"2", *[b"x"] * 13, *[b"y"] * 26])
    assert outcome(line) is Malformed.BAD_LABEL
    assert outcome(b"1" + line[1:]) is Malformed.BAD_INTEGER
    assert outcomes(line + b"\n" + b"1" + line[1:]) == [
        Malformed.BAD_LABEL,
        Malformed.BAD_INTEGER,
    ]


@pytest.mark.parametrize("line_end", [b"", b"\n", b"\r\n"])
def test_line_ends(line_end: bytes) -> None:
    assert outcome(ROW + line_end) == outcome(ROW)
    assert outcomes(ROW + line_end) == [outcome(ROW)]


def test_no_lines() -> None:
    parsed = parse_lines(b"", VOCABULARIES)
    assert len(parsed.records) == len(parsed.reasons) == 0
    assert outcomes(b"\n\r\n") == [Malformed.TOO_FEW_FIELDS] * 2


def test_length_limit_is_exact() -> None:
    for size in (parse.MAX_LINE_BYTES, parse.MAX_LINE_BYTES + 1):
        line = b"x" * size
        expected = (
            Malformed.LINE_TOO_LONG if size > parse.MAX_LINE_BYTES else Malformed.TOO_FEW_FIELDS
        )
        assert outcome(line + b"\r\n") is expected
        assert outcomes(line + b"\r\n") == [expected]


def split_lines(block: bytes) -> list[bytes]:
    """The lines of a block, of which the last need not have a line end."""
    whole = block.split(b"\n")
    return whole if whole[-1] else whole[:-1]


integers = st.one_of(
    st.just(b""),
    st.integers(-3, 10**7).map(lambda n: b"%d" % n),
    st.from_regex(rb"-?[0-9]{17,19}", fullmatch=True),
)
categories = st.one_of(st.just(b""), st.from_regex(rb"[0-9a-fA-F]{1,8}", fullmatch=True))
good_lines = st.tuples(
    st.sampled_from([b"0", b"1"]),
    st.lists(integers, min_size=13, max_size=13),
    st.lists(categories, min_size=26, max_size=26),
).map(lambda row: b"\t".join([row[0], *row[1], *row[2]]))
junk = st.text("0123456789abcdefgABCDEFG-+. \t\r\x00\x7fé\U0001f600", max_size=12).map(str.encode)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A good line, now and then with junk written over a part of it, or junk alone."""
    line = draw(good_lines)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        start = draw(st.integers(0, len(line)))
        end = start + draw(st.integers(0, 12))
        line = line[:start] + draw(junk) + line[end:]
    return draw(st.one_of(st.just(line), junk)) + draw(st.sampled_from([b"\n", b"\r\n"]))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(lines(), max_size=6), st.sampled_from([b"", ROW, b"\r", b"1\t"]))
@example([line + b"\n" for line, _ in MALFORMED], b"")
def test_block_parser_equals_line_parser(ended: list[bytes], unended: bytes) -> None:
    block = b"".join(ended) + unended
    assert outcomes(block) == [outcome(line) for line in split_lines(block)]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_have_an_answer(block: bytes) -> None:
    assert outcomes(block) == [outcome(line) for line in split_lines(block)]
