"""Preparing: complete pairs of files or none, malformed rows counted, errors with what to do."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipelines.criteo import lines, parse, schema
from pipelines.criteo import records as module
from pipelines.criteo.generate import generate
from pipelines.criteo.records import PrepareError, is_current, load, load_or_prepare, prepare

ROW = b"\t".join([b"1", *[b"7"] * 13, *[b"%08x" % n for n in range(26)]])
SMALL = (40,) * 26


def prepared_records(content: bytes, directory: Path) -> bytes:
    """The bytes of the records made from `content`."""
    source = directory / "source"
    source.write_bytes(content)
    return prepare(source, directory / "x.records", progress=False).records().tobytes()


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty thousand generated rows: several blocks."""
    path = tmp_path_factory.mktemp("generated") / "rows.tsv"
    generate(20_000, path, 1, SMALL, progress=False)
    return path


def test_generated_rows(generated: Path, tmp_path: Path) -> None:
    destination = tmp_path / "new" / "x.records"
    prepared = prepare(generated, destination, SMALL, progress=False)
    assert prepared == load(destination)
    assert (prepared.num_records, prepared.vocabularies) == (20_000, SMALL)
    assert prepared.quarantined == {}
    rows = generated.read_bytes().splitlines()
    records = prepared.records()
    for index in (0, 1, 9_999, 19_999):  # the order of the file is kept
        line = parse.parse_line(rows[index], SMALL)
        assert isinstance(line, np.void)
        assert line.tobytes() == records[index].tobytes()
    whole = parse.parse_lines(generated.read_bytes(), SMALL).records
    assert whole.tobytes() == records.tobytes()
    assert sorted(path.name for path in destination.parent.iterdir()) == [
        "x.records",
        "x.records.json",
    ]


@pytest.mark.parametrize("block_bytes", [1, 100, 5000])
def test_block_size_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    content = b"\n".join([ROW, b"bad", b"z" * 5000, ROW, b"", ROW])
    expected = prepared_records(content, tmp_path)
    report = (tmp_path / "x.records.json").read_text()
    monkeypatch.setattr(lines, "_BLOCK_BYTES", block_bytes)
    assert prepared_records(content, tmp_path) == expected
    assert (
        json.loads(report)["quarantined"]
        == module._read_sidecar(tmp_path / "x.records")["quarantined"]
    )


def test_gzip_is_known_by_content_not_name(generated: Path, tmp_path: Path) -> None:
    plain_named_gz, gz_named_plain = tmp_path / "a.gz", tmp_path / "a.tsv"
    plain_named_gz.write_bytes(generated.read_bytes())
    gz_named_plain.write_bytes(gzip.compress(generated.read_bytes()))
    made = [
        prepare(source, tmp_path / "x", SMALL, progress=False).records().tobytes()
        for source in (generated, plain_named_gz, gz_named_plain)
    ]
    assert made[0] == made[1] == made[2]


def test_gzip_of_several_members(tmp_path: Path) -> None:
    content = gzip.compress(ROW[:50]) + gzip.compress(ROW[50:] + b"\n" + ROW)
    assert prepared_records(content, tmp_path) == prepared_records(ROW + b"\n" + ROW, tmp_path)


@pytest.mark.parametrize("variant", [b"%b\n%b\n", b"%b\r\n%b\r\n", b"%b\r\n%b", b"%b\n%b"])
def test_line_ends(tmp_path: Path, variant: bytes) -> None:
    expected = parse.parse_lines(ROW + b"\n" + ROW, schema.TABLE3_VOCABULARIES).records
    assert prepared_records(variant % (ROW, ROW), tmp_path) == expected.tobytes()


def test_malformed_rows_are_counted_by_reason(tmp_path: Path) -> None:
    secret = b"SECRET"
    bad = {
        "line_too_long": secret * 1000,
        "bad_encoding": ROW + b"\xff" + secret,
        "too_few_fields": secret,
        "too_many_fields": ROW + b"\t" + secret,
        "bad_label": secret + ROW,
        "bad_integer": ROW.replace(b"\t7\t", b"\t" + secret + b"\t"),
        "bad_category": ROW + secret,
    }
    assert set(bad) == set(parse.Malformed)
    source, destination = tmp_path / "a.tsv", tmp_path / "a.records"
    source.write_bytes(b"\n".join([ROW, *bad.values(), *bad.values(), ROW]))
    prepared = prepare(source, destination, progress=False)
    assert prepared.num_records == 2
    assert prepared.quarantined == dict.fromkeys(bad, 2)
    sidecar = (tmp_path / "a.records.json").read_text()
    first_lines = [of["first_line"] for of in json.loads(sidecar)["quarantined"].values()]
    assert first_lines == list(range(2, 9))
    assert "SECRET" not in sidecar


def test_line_numbers_run_through_blocks(generated: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.tsv"
    source.write_bytes(generated.read_bytes() + b"bad\n")
    prepare(source, tmp_path / "x", SMALL, progress=False)
    described = json.loads((tmp_path / "x.json").read_text())
    assert described["quarantined"]["too_few_fields"]["first_line"] == 20_001


def truncated(content: bytes) -> bytes:
    """A gzip file cut in the middle."""
    compressed = gzip.compress(content)
    return compressed[: len(compressed) // 2]


def corrupted(content: bytes) -> bytes:
    """A gzip file whose checksum is wrong."""
    compressed = bytearray(gzip.compress(content))
    compressed[-6] ^= 1
    return bytes(compressed)


BAD_SOURCES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "a.tsv is empty: it has no rows"),
    "empty gzip": (lambda _: gzip.compress(b""), "No row of .*a.tsv is well-formed: .*no rows"),
    "blank lines": (
        lambda _: b"\n\n",
        "No row .* well-formed: 2 × too_few_fields, first in line 1",
    ),
    "commas": (lambda rows: rows.replace(b"\t", b","), "20000 × too_few_fields, first in line 1"),
    "binary": (lambda _: bytes(range(128, 256)) * 9, "1 × bad_encoding"),
    "truncated": (truncated, r"a.tsv ends early after [1-9]\d* rows \(truncated .gz\)"),
    "cut in header": (lambda _: gzip.compress(ROW)[:5], r"ends early after 0 rows"),
    "no trailer": (lambda rows: gzip.compress(rows)[:-8], r"ends early after 20000 rows"),
    "corrupted": (corrupted, r"a.tsv is damaged after 20000 rows \(CRC check failed"),
    "garbage": (lambda _: b"\x1f\x8b" + b"x" * 99, r"a.tsv is damaged after 0 rows \(Unknown"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
@pytest.mark.parametrize("existing", [False, True])
def test_bad_sources_write_nothing(
    generated: Path, tmp_path: Path, case: str, existing: bool
) -> None:
    spoil, message = BAD_SOURCES[case]
    destination = tmp_path / "out" / "x.records"
    if existing:
        prepare(generated, destination, SMALL, progress=False)
    before = {path: path.read_bytes() for path in destination.parent.glob("*")}
    source = tmp_path / "a.tsv"
    source.write_bytes(spoil(generated.read_bytes()))
    with pytest.raises(PrepareError, match=message):
        prepare(source, destination, SMALL, progress=False)
    assert {path: path.read_bytes() for path in destination.parent.glob("*")} == before


def test_bad_paths(tmp_path: Path) -> None:
    source = tmp_path / "a.tsv"
    with pytest.raises(PrepareError, match=r"No such file: .*a\.tsv"):
        prepare(source, tmp_path / "x", progress=False)
    source.write_bytes(ROW)
    with pytest.raises(PrepareError, match="Expected a file, got source="):
        prepare(tmp_path, tmp_path / "x", progress=False)
    with pytest.raises(PrepareError, match="Expected a file name, got destination="):
        prepare(source, tmp_path, progress=False)
    with pytest.raises(PrepareError, match="would overwrite the source"):
        prepare(source, source, progress=False)
    assert source.read_bytes() == ROW


def test_bad_vocabularies(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="Expected 26 vocabularies"):
        prepare(tmp_path / "a", tmp_path / "x", [3])
    with pytest.raises(PrepareError, match=r"got vocabularies\[0\]=0"):
        prepare(tmp_path / "a", tmp_path / "x", [0] * 26)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError("No space left on device")])
def test_interrupt_leaves_no_half_written_file(
    generated: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: type[BaseException] | BaseException,
) -> None:
    blocks = []

    def interrupted(block: bytes, vocabularies: tuple[int, ...]) -> parse.ParsedLines:
        blocks.append(block)
        if len(blocks) == 3:
            assert len(list(tmp_path.iterdir())) == 2  # they were being written
            raise interrupt
        return parse.parse_lines(block, vocabularies)

    monkeypatch.setattr(module, "parse_lines", interrupted)
    with pytest.raises((KeyboardInterrupt, OSError)):
        prepare(generated, tmp_path / "x", SMALL, progress=False)
    assert not list(tmp_path.iterdir())


def test_at_no_moment_do_old_and_new_make_a_pair(
    generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(generated, tmp_path / "x", SMALL, progress=False)
    placed, replace = [], Path.replace

    def watched(path: Path, target: Path) -> Path:
        placed.append((target.name, (tmp_path / "x.json").exists()))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    prepare(generated, tmp_path / "x", SMALL, progress=False)
    assert placed == [("x", False), ("x.json", False)]


def test_reuse(tmp_path: Path) -> None:
    source, destination = tmp_path / "a.tsv", tmp_path / "x"
    source.write_bytes(ROW)
    assert not is_current(source, destination)
    load_or_prepare(source, destination, progress=False)
    assert is_current(source, destination)
    assert not is_current(source, destination, SMALL)
    written = destination.stat().st_mtime_ns
    load_or_prepare(source, destination, progress=False)
    assert destination.stat().st_mtime_ns == written
    source.write_bytes(ROW + b"\n" + ROW)
    assert not is_current(source, destination)
    assert load_or_prepare(source, destination, progress=False).num_records == 2
    status = source.stat()
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not is_current(source, destination)
    source.unlink()
    assert not is_current(source, destination)


def test_prepared_under_the_name_of_the_source(tmp_path: Path) -> None:
    source, directory = tmp_path / "a.tsv", tmp_path / "new"
    source.write_bytes(ROW)
    prepared = module.prepared_in(directory, source, SMALL)
    assert (prepared.path, prepared.vocabularies) == (directory / "a.tsv.records", SMALL)
    written = prepared.path.stat().st_mtime_ns
    assert module.prepared_in(directory, source, list(SMALL)) == prepared
    assert prepared.path.stat().st_mtime_ns == written


def test_load_checks_the_pair(tmp_path: Path) -> None:
    records, sidecar = tmp_path / "x.records", tmp_path / "x.records.json"
    with pytest.raises(PrepareError, match=r"No prepared data at .*x.records.json is missing"):
        load(records)
    prepared_records(ROW, tmp_path)
    records.write_bytes(records.read_bytes()[:-1])
    with pytest.raises(PrepareError, match=r"Expected 160 bytes in .*found 159: prepare it again"):
        load(records)
    records.unlink()
    with pytest.raises(PrepareError, match="found 0"):
        load(records)
    for content in ("{", "[]", '{"format": "other"}'):
        sidecar.write_text(content)
        with pytest.raises(PrepareError, match="not a sidecar of format criteo-records-1"):
            load(records)


def test_records_are_read_only(tmp_path: Path) -> None:
    source = tmp_path / "a.tsv"
    source.write_bytes(ROW)
    records = prepare(source, tmp_path / "x", progress=False).records()
    with pytest.raises(ValueError, match="read-only"):
        records["label"] = 0


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, destination = tmp_path / "a.tsv", tmp_path / "x.records"
    assert module.main([str(source), str(destination)]) == 1
    assert "error: No such file" in capsys.readouterr().err
    source.write_bytes(ROW + b"\nbad")
    assert module.main([str(source), str(destination)]) == 0
    output = capsys.readouterr()
    assert "1 records" in output.out
    assert "quarantined: 1 × too_few_fields" in output.out
    assert "a.tsv: 100%" in output.err


def test_real_criteo_rows(tmp_path: Path) -> None:
    if "DP_SPARSE_DATA" not in os.environ:
        pytest.skip("left out: DP_SPARSE_DATA is not set, so there are no real Criteo rows")
    source = Path(os.environ["DP_SPARSE_DATA"]) / "criteo" / "kaggle_sample_120k.tsv.gz"
    if not source.exists():
        pytest.skip(f"left out: {source} is not there")
    prepared = prepare(source, tmp_path / "x", progress=False)
    assert (prepared.num_records, prepared.quarantined) == (120_000, {})
    records = prepared.records()
    assert records["label"].mean() == pytest.approx(0.25615, abs=1e-5)
    assert (records["categories"] < schema.TABLE3_VOCABULARIES).all()
    with gzip.open(source) as rows:
        for line, record in zip(rows, records[:300], strict=False):
            parsed = parse.parse_line(line, schema.TABLE3_VOCABULARIES)
            assert isinstance(parsed, np.void)
            assert parsed.tobytes() == record.tobytes()
