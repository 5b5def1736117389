"""Reads lines from plain or gzip files in bounded memory.

Lines come in blocks of about 1 MiB, with a progress bar. Memory does not depend on the length of
the file or of its longest line.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)
"""What a truncated (EOFError) or damaged gzip file raises."""

_BLOCK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


def line_blocks(source: Path, max_line_bytes: int, progress: bool) -> Iterator[bytes]:
    """Yields the bytes of `source`, decompressed, in blocks of whole lines.

    The last line need not have a line end. A line of more than `max_line_bytes` may lose its
    middle or its tail, but stays longer than that.

    Raises:
        EOFError, zlib.error, gzip.BadGzipFile: A gzip file is truncated or damaged. The whole
            lines before the damage are yielded first.
    """
    with source.open("rb") as raw:
        size = os.fstat(raw.fileno()).st_size
        yield from whole_lines(watched(raw, source.name, size, progress), max_line_bytes)


def whole_lines(blocks: Iterator[bytes], max_line_bytes: int) -> Iterator[bytes]:
    """The same bytes in blocks of whole lines, as `line_blocks`."""
    rest = b""
    for block in blocks:
        lines, line_end, unfinished = block.rpartition(b"\n")
        if line_end:
            yield rest + lines + line_end
            rest = b""
        # The limit, one more byte and a carriage return: enough to see that it is exceeded.
        rest = (rest + unfinished)[: max_line_bytes + 2]
    if rest:
        yield rest


def watched(raw: Any, name: str, size: int, progress: bool) -> Iterator[bytes]:
    """`decompressed`, with a bar that counts the bytes of the file itself.

    Args:
        raw: As in `decompressed`.
        name: What the bar is called.
        size: Bytes of the file.
        progress: Whether to show the bar.
    """
    with tqdm(total=size, unit="B", unit_scale=True, desc=name, disable=not progress) as bar:
        for block in decompressed(raw):
            yield block
            bar.update(raw.tell() - bar.n)


def decompressed(raw: Any) -> Iterator[bytes]:
    """The bytes of an open file, unpacked if it is gzip; those before a damage come first.

    Args:
        raw: With `read`, `seek` and `tell`, such as a file of `tf.io.gfile`.
    """
    compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    stream: Any = gzip.GzipFile(fileobj=raw) if compressed else raw
    read = getattr(stream, "read1", stream.read)
    pieces: list[bytes] = []
    try:
        while piece := read(_BLOCK_BYTES):
            pieces.append(piece)
            if sum(map(len, pieces)) >= _BLOCK_BYTES:
                yield b"".join(pieces)
                pieces.clear()
    except DAMAGE:
        yield b"".join(pieces)
        raise
    yield b"".join(pieces)


def hashed(blocks: Iterator[bytes], digest: Any) -> Iterator[bytes]:
    """The same blocks, each of which `digest`, of hashlib, gets before it is passed on."""
    for block in blocks:
        digest.update(block)
        yield block
