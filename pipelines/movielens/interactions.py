"""Interactions, `user item` in each line in the order of time: SASRec's format, plain or .gz.

Lines of one user need not be in one piece. Empty lines are counted and skipped. A line that is not
two integers stops the reading, or is counted and skipped with `quarantine`. Counts are of private
data, and are printed for anyone who runs the job.
"""

import dataclasses
import gzip
from collections.abc import Sequence
from pathlib import Path

import ml_collections
import numpy as np

from pipelines.prepared_tfds import builder_of


class SequenceDataError(ValueError):
    """Interactions are missing, or in a form that the pipeline does not read."""


@dataclasses.dataclass(frozen=True)
class Interactions:
    """Who took what, in the order of time for each user.

    Attributes:
        users: int64 `[interactions]`, each user in one piece.
        items: int64 `[interactions]`.
        empty_lines: Lines without anything.
        bad_lines: Lines that were not two integers, and were left out.
        unsorted_users: Users whose lines were not in one piece, and were brought together.
    """

    users: np.ndarray
    items: np.ndarray
    empty_lines: int = 0
    bad_lines: int = 0
    unsorted_users: int = 0

    def sequences(self) -> list[np.ndarray]:
        """The items of each user, in the order of the users' numbers."""
        return np.split(self.items, np.flatnonzero(np.diff(self.users)) + 1)


def load(config: ml_collections.ConfigDict) -> Interactions:
    """The interactions of `config.data`.

    Raises:
        SequenceDataError: Neither or both of `path` and `tfds` are given, the file cannot be read
            as interactions, or the dataset is not prepared.
        ImportError: `tfds` is given and tensorflow-datasets is not installed.
    """
    if bool(config.path) == bool(config.tfds):
        raise SequenceDataError(
            f"Expected either data.path or data.tfds, got data.path={config.path!r} and "
            f"data.tfds={config.tfds!r}: pass --config.data.path=FILE."
        )
    if config.tfds:
        return from_tfds(config)
    return read(Path(config.path), quarantine=config.quarantine)


def read(path: Path, quarantine: bool = False) -> Interactions:
    """Reads a file.

    Raises:
        SequenceDataError: There is no such file, it has no interaction, or, without `quarantine`,
            a line that is not two integers.
    """
    if not path.is_file():
        raise SequenceDataError(f"No such file: {path}.")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            rows = [line.split() for line in file]
    except (OSError, EOFError) as error:
        raise SequenceDataError(f"Expected lines of `user item` in {path}, got {error}.") from error
    pairs, bad = _pairs(rows, path, quarantine)
    empty = sum(not row for row in rows)
    if not len(pairs):
        raise SequenceDataError(
            f"Expected interactions in {path}, got none in {len(rows)} lines ({empty} empty, "
            f"{bad} not two integers)."
        )
    return _by_user(pairs[:, 0], pairs[:, 1], empty, bad)


def from_tfds(config: ml_collections.ConfigDict) -> Interactions:
    """Ratings of tensorflow-datasets, such as movielens/1m-ratings, sorted by time.

    Those of one second are in the order of their items: the order in which the dataset has them
    would be another one without one of the users.

    Raises:
        SequenceDataError: They are not prepared.
        ImportError: tensorflow-datasets is not installed.
    """
    try:
        builder = builder_of(config.tfds, config.directory)
    except ValueError as error:
        raise SequenceDataError(str(error)) from error
    import tensorflow_datasets as tfds

    columns = tfds.as_numpy(builder.as_dataset(split="train", batch_size=-1))
    users, items = (columns[name].astype(np.int64) for name in ("user_id", "movie_id"))
    order = np.lexsort((items, columns["timestamp"]))
    found = _by_user(users[order], items[order], 0, 0)
    return dataclasses.replace(found, unsorted_users=0)  # time was sorted over all users


def _pairs(rows: Sequence[list[bytes]], path: Path, quarantine: bool) -> tuple[np.ndarray, int]:
    """int64 `[interactions, 2]`, and how many lines were left out."""
    filled = [row for row in rows if row]
    good = [row for row in filled if _is_pair(row)]
    if len(good) == len(filled):
        return np.array(good, np.int64).reshape(-1, 2), 0
    if not quarantine:
        number, row = next((n, r) for n, r in enumerate(rows, 1) if r and not _is_pair(r))
        raise SequenceDataError(
            f"Expected two integers, `user item`, in line {number} of {path}, got "
            f"{b' '.join(row).decode(errors='replace')!r}. Fix the file, or leave such lines out "
            "with --config.data.quarantine."
        )
    return np.array(good, np.int64).reshape(-1, 2), len(filled) - len(good)


def _is_pair(row: list[bytes]) -> bool:
    return len(row) == 2 and all(_is_integer(field) for field in row)


def _is_integer(field: bytes) -> bool:
    digits = field.removeprefix(b"-")
    return digits.isdigit() and len(digits) < 19


def _by_user(users: np.ndarray, items: np.ndarray, empty: int, bad: int) -> Interactions:
    """Each user in one piece, the order of the lines kept."""
    pieces = np.count_nonzero(np.diff(users)) + 1
    _, of_pieces = np.unique(
        users[np.flatnonzero(np.diff(users, prepend=users[0] - 1))], return_counts=True
    )
    assert of_pieces.sum() == pieces
    order = np.argsort(users, kind="stable")
    unsorted = int(np.count_nonzero(of_pieces > 1))
    return Interactions(users[order], items[order], empty, bad, unsorted)
