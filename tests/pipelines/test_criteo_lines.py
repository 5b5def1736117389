"""Reading in bounded memory."""

import gzip
import hashlib
from pathlib import Path

import pytest

from pipelines.criteo import lines
from pipelines.criteo.shards import blocks_of


def read(source: Path, max_line_bytes: int = 100) -> list[bytes]:
    """The blocks of a file, without a progress bar."""
    return list(lines.line_blocks(source, max_line_bytes, progress=False))


@pytest.mark.parametrize("content", [b"a\nb\n", b"a\nb", b"\n\n", b"a\r\nb\r", b"x", b""])
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 1000])
def test_blocks_are_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, block_bytes: int
) -> None:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", block_bytes)
    source = tmp_path / "a"
    for stored in (content, gzip.compress(content)):
        source.write_bytes(stored)
        blocks = read(source)
        assert b"".join(blocks) == content
        assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_endless_line_stays_small_and_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 1000)
    source = tmp_path / "a"
    source.write_bytes(b"ok\n" + b"x" * 10**6 + b"\nok\n" + b"\r" * 10**6)
    found = b"".join(read(source)).split(b"\n")
    assert found[0] == found[2] == b"ok"
    assert 100 < len(found[1]) < 2000
    assert 100 < len(found[3].removesuffix(b"\r")) < 2000


def test_a_digest_is_that_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are cut from a line too long: the file's own, by any other program."""
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 1000)
    content = b"ok\n" + b"x" * 10**5 + b"\nok"
    for name, stored in (("plain", content), ("packed", gzip.compress(content))):
        (tmp_path / name).write_bytes(stored)
        digest = hashlib.sha256()
        cut = b"".join(blocks_of(str(tmp_path / name), digest=digest))
        assert len(cut) < 10**4
        assert digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_lines_before_a_truncation_arrive(tmp_path: Path) -> None:
    source = tmp_path / "a.gz"
    source.write_bytes(gzip.compress(b"first\nsecond\nthird")[:-8])
    blocks = lines.line_blocks(source, 100, progress=False)
    assert next(blocks) == b"first\nsecond\n"
    with pytest.raises(EOFError):
        next(blocks)
