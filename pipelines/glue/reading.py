"""Sentences and labels, from GLUE's TSV files, plain or .gz, or from tensorflow-datasets.

A line with another number of fields than the header, an empty sentence, a label that the task does
not have, or bytes that are not UTF-8 stop the reading, or are left out and counted with
`data.quarantine`. Counts are of private data, and are printed for anyone who runs the job.
"""

import collections
import dataclasses
import gzip
import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from pipelines.glue.tasks import Columns, GlueDataError, Task
from pipelines.prepared_tfds import builder_of

FIELDS, EMPTY, LABEL, BYTES = "fields", "empty sentence", "label", "bytes"
_EXPECTED = {
    FIELDS: "as many fields as the header has",
    EMPTY: "a sentence",
    LABEL: "a label of the task",
    BYTES: "UTF-8",
}


@dataclasses.dataclass(frozen=True)
class Sentences:
    """What was read.

    Attributes:
        texts: The sentences of each example, or the first and the second ones of pairs.
        labels: int8 `[examples]`: classes from 0 on.
        left_out: How many lines were left out for each reason that occurred.
    """

    texts: tuple[list[str], ...]
    labels: np.ndarray
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class TextFile:
    """One split of a task in a folder."""

    path: Path
    columns: Columns
    task: Task
    quarantine: bool

    def digest(self) -> str:
        """A hash of the bytes, of the columns that are read, and of how."""
        found = hashlib.sha256(f"{self.columns}{dict(self.task.labels)}{self.quarantine}".encode())
        _add_bytes(found, self.path)
        return found.hexdigest()

    def read(self) -> Sentences:
        """Reads the file.

        Raises:
            GlueDataError: It is no such file, lacks a column or has no example, or, without
                `quarantine`, a line that is malformed.
        """
        opened = gzip.open if self.path.suffix == ".gz" else open
        try:
            with opened(self.path, "rb") as file:
                return self._of_lines(file)
        except (OSError, EOFError) as error:
            raise GlueDataError(f"Expected a TSV file in {self.path}, got {error}.") from error

    def _of_lines(self, lines: Iterable[bytes]) -> Sentences:
        iterator = iter(lines)
        header = next(iterator, b"").decode("utf-8-sig", errors="replace").rstrip("\r\n")
        places = self._places(header.split("\t"))
        texts: list[list[str]] = [[] for _ in self.columns.texts]
        labels, left_out = [], collections.Counter[str]()
        for number, line in enumerate(iterator, start=2):
            fields, reason = self._fields(line, places, header.count("\t") + 1)
            if reason:
                self._refuse(number, line, reason)
                left_out[reason] += 1
                continue
            labels.append(self.task.labels[fields[-1]])
            for column, text in zip(texts, fields[:-1], strict=True):
                column.append(text)
        if not labels:
            raise GlueDataError(
                f"Expected examples in {self.path}, got none; left out: {dict(left_out)}. Is "
                f"it the file of task={self.task.name!r}?"
            )
        return Sentences(tuple(texts), np.array(labels, np.int8), dict(left_out))

    def _places(self, header: list[str]) -> list[int]:
        wanted = (*self.columns.texts, self.columns.label)
        missing = [name for name in wanted if name not in header]
        if missing:
            raise GlueDataError(
                f"Expected the columns {wanted} in the first line of {self.path}, got "
                f"{tuple(header)[:8]}, without {missing[0]!r}."
            )
        return [header.index(name) for name in wanted]

    def _fields(self, line: bytes, places: list[int], count: int) -> tuple[list[str], str]:
        """The sentences and the label, or what is wrong with them."""
        try:
            fields = line.decode("utf-8").rstrip("\r\n").split("\t")
        except UnicodeDecodeError:
            return [], BYTES
        if len(fields) != count:
            return [], FIELDS
        own = [fields[place].strip() for place in places]
        if not all(map(_says_something, own[:-1])):
            return [], EMPTY
        return own, "" if own[-1] in self.task.labels else LABEL

    def _refuse(self, number: int, line: bytes, reason: str) -> None:
        if self.quarantine:
            return
        raise GlueDataError(
            f"Expected {_EXPECTED[reason]} in line {number} of {self.path}, got "
            f"{line[:80].decode(errors='replace')!r}; labels are {tuple(self.task.labels)}. Fix "
            "the file, or leave such lines out with --config.data.quarantine."
        )


@dataclasses.dataclass(frozen=True)
class TfdsSplit:
    """One split of a task in tensorflow-datasets, prepared before."""

    columns: Columns
    task: Task
    directory: str
    quarantine: bool

    def digest(self) -> str:
        """A hash of the prepared files, and of how they are read."""
        found = hashlib.sha256(f"{self.columns}{dict(self.task.labels)}{self.quarantine}".encode())
        for path in sorted(Path(self._builder().data_dir).rglob("*")):
            if path.is_file():
                found.update(f"{path.name} {path.stat().st_size} ".encode())
                _add_bytes(found, path)
        return found.hexdigest()

    def read(self) -> Sentences:
        """Reads the split.

        Raises:
            GlueDataError: It is not prepared, or, without `quarantine`, has an empty sentence, one
                that is not UTF-8, or no label.
        """
        import tensorflow_datasets as tfds

        builder = self._builder()
        columns = tfds.as_numpy(
            builder.as_dataset(split=self.columns.tfds.split(":")[1], batch_size=-1)
        )
        texts = [_decoded(columns[name]) for name in self.columns.texts]
        labels = np.asarray(columns["label"])
        rows = zip(*texts, labels, strict=True)
        reasons = [self._reason(own, label) for *own, label in rows]
        left_out = collections.Counter(reason for reason in reasons if reason)
        if left_out and not self.quarantine:
            raise GlueDataError(
                f"Expected sentences in UTF-8 and labels in {self.columns.tfds}, got what has "
                f"none, by reasons: {dict(left_out)}. Leave it out with --config.data.quarantine."
            )
        kept = [row for row, reason in enumerate(reasons) if not reason]
        return Sentences(
            tuple([column[i] or "" for i in kept] for column in texts),
            labels[kept].astype(np.int8),
            dict(left_out),
        )

    def _reason(self, texts: Sequence[str | None], label: int) -> str:
        """What is wrong with an example; empty if nothing is."""
        if None in texts:
            return BYTES
        if not all(_says_something(text or "") for text in texts):
            return EMPTY
        return "" if 0 <= label < self.task.classes else LABEL

    def _builder(self) -> Any:
        name = self.columns.tfds.split(":")[0]
        if not name:
            raise GlueDataError(
                f"Expected data.path for task={self.task.name!r}, of which tensorflow-datasets has "
                "no such columns, got data.tfds=True."
            )
        try:
            return builder_of(name, self.directory)
        except (ImportError, ValueError) as error:
            raise GlueDataError(str(error)) from error


def source_of(config: ml_collections.ConfigDict, task: Task, split: str) -> TextFile | TfdsSplit:
    """Where `config` has one split of a task.

    Raises:
        GlueDataError: Neither or both of `path` and `tfds` are given, or there is no such file.
    """
    if bool(config.path) == bool(config.tfds):
        raise GlueDataError(
            f"Expected either data.path, a folder, or data.tfds, got data.path={config.path!r} and "
            f"data.tfds={config.tfds}: pass --config.data.path=FOLDER."
        )
    columns = task.splits[split]
    if config.tfds:
        return TfdsSplit(columns, task, config.directory, config.quarantine)
    plain = Path(config.path) / columns.file
    for path in (plain, plain.with_name(plain.name + ".gz")):
        if path.is_file():
            return TextFile(path, columns, task, config.quarantine)
    raise GlueDataError(
        f"Expected {columns.file} or {columns.file}.gz in data.path={config.path!r}, got neither: "
        "give the folder that has it."
    )


def _add_bytes(found: Any, path: Path) -> None:
    """Adds a file to a hash."""
    with path.open("rb") as file:
        while block := file.read(2**20):
            found.update(block)


def _decoded(values: Iterable[bytes]) -> list[str | None]:
    """The texts; None for what is not UTF-8."""

    def text(value: bytes) -> str | None:
        try:
            return value.decode("utf-8").strip()
        except UnicodeDecodeError:
            return None

    return [text(value) for value in values]


def _says_something(text: str) -> bool:
    """Whether a text has a character that is neither a space nor a control character."""
    return any(unicodedata.category(character)[0] not in "CZ" for character in text)
