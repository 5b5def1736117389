"""Lines of one file wherever TensorFlow can read it, and those that are malformed, kept apart."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from pipelines.criteo.lines import DAMAGE, hashed, watched, whole_lines
from pipelines.criteo.parse import MAX_LINE_BYTES, REASONS, WELL_FORMED
from pipelines.criteo.records import PrepareError


def blocks_of(path: str, progress: bool = False, digest: Any = None) -> Iterator[bytes]:
    """The lines of a file, plain or gzip, in blocks of whole ones; the last may have no end.

    Args:
        path: Local, or any path of `tf.io.gfile`.
        progress: Whether to show how much of the file was read.
        digest: Of hashlib, gets all that is unpacked: also what is cut from a line too long.

    Raises:
        PrepareError: The file is missing, cut or damaged. What is before comes first.
    """
    lines = 0
    try:
        with tf.io.gfile.GFile(path, "rb") as raw:
            size = tf.io.gfile.stat(path).length
            blocks = watched(raw, path, size, progress)
            if digest is not None:
                blocks = hashed(blocks, digest)
            for block in whole_lines(blocks, MAX_LINE_BYTES):
                yield block
                lines += block.count(b"\n")
    except DAMAGE as error:
        how = "ends early" if isinstance(error, EOFError) else "is damaged"
        raise PrepareError(
            f"{path} {how} after {lines} rows ({error}). Get the file again."
        ) from error
    except tf.errors.NotFoundError:
        raise PrepareError(f"No such file: {path}. Name Criteo TSV files, plain or gzip.") from None


def malformed_lines(block: bytes, reasons: np.ndarray, first: int) -> bytes:
    """Those of a block, each as its number, its reason and the line itself.

    Args:
        block: Whole lines.
        reasons: Of each, as `ParsedLines` has them.
        first: The number of the first line, from 1.
    """
    bad = np.flatnonzero(reasons != WELL_FORMED)
    lines = block.split(b"\n") if len(bad) else []
    return b"".join(
        b"%d\t%s\t%s\n" % (first + place, REASONS[reasons[place]].encode(), lines[place])
        for place in bad
    )
