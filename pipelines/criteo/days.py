"""The files of days: which there are, that none is missing, empty, out of order or there twice."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from pipelines.criteo.lines import DAMAGE, decompressed
from pipelines.criteo.records import PrepareError

_BEGIN_BYTES = 1 << 20  # a file of the same rows begins with the same ones, however packed
_ENDINGS = ("", ".gz", ".tsv", ".tsv.gz", ".txt", ".txt.gz")
_NUMBER_OF_DAY = re.compile(r"day_(\d+)(?:\.(?:tsv|txt))?(?:\.gz)?")


def files_of(folder: str, names: Sequence[str]) -> dict[str, str]:
    """The path of each name's file in a folder, plain or .gz, in the order of `names`.

    Raises:
        PrepareError: A file is missing, empty, damaged at its beginning or there under two names,
            or two of them begin with the same megabyte of rows.
    """
    found = {name: _file_of(folder, name, names) for name in names}
    check_different(list(found.values()))
    return found


def check_order(paths: Sequence[str]) -> None:
    """Checks that files which are named as days are in the order of time, without a gap.

    Raises:
        PrepareError: They are not.
    """
    matches = [_NUMBER_OF_DAY.fullmatch(Path(path).name) for path in paths]
    for before, after, path in zip(matches, matches[1:], paths[1:], strict=False):
        if before and after and int(after[1]) != int(before[1]) + 1:
            raise PrepareError(
                f"Expected days in the order of time and none left out, got {path} after "
                f"{before[0]}: give them as day_0, day_1, ..."
            )


def check_different(paths: Sequence[str]) -> None:
    """Checks that no two files begin with the same rows.

    Raises:
        PrepareError: Two of them do, or one is missing, empty or damaged at its beginning.
    """
    seen: dict[bytes, str] = {}
    for path in paths:
        digest = _digest_of_begin(path)
        if digest in seen:
            raise PrepareError(
                f"Expected each file once, got the same rows at the beginning of {seen[digest]} "
                f"and {path}: leave one out. An example would train twice and be paid for once, or "
                "judge a model that has trained on it."
            )
        seen[digest] = path


def _file_of(folder: str, name: str, names: Sequence[str]) -> str:
    paths = [f"{folder}/{name}{ending}" for ending in _ENDINGS]
    there = [path for path in paths if tf.io.gfile.exists(path)]
    if not there:
        wanted = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        raise PrepareError(
            f"Expected {wanted} in {folder}, got no {name}: put the file there, as TSV or .gz "
            f"({', '.join(name + ending for ending in _ENDINGS)})."
        )
    if len(there) > 1:
        raise PrepareError(
            f"Expected one file of {name}, got {' and '.join(there)}: remove all but one."
        )
    return there[0]


def _digest_of_begin(path: str) -> bytes:
    try:
        with tf.io.gfile.GFile(path, "rb") as raw:
            block = next((block for block in decompressed(raw) if block), b"")
    except DAMAGE as error:
        raise PrepareError(f"{path} is damaged ({error}): get the file again.") from error
    except tf.errors.NotFoundError:
        raise PrepareError(f"No such file: {path}. Name Criteo TSV files, plain or gzip.") from None
    if not block.strip():
        raise PrepareError(f"{path} is empty: it has no rows.")
    return hashlib.sha256(block[:_BEGIN_BYTES]).digest()
