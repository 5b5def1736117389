"""Tokens on disk: one record of a fixed width for each example, made once.

`TASK-SPLIT-KEY.records` holds the records, and `.json` beside it what was counted. KEY is a hash of
the text, the tokenizer and the length, so that another of these makes another file. Both are
written whole or not at all, the sidecar last. Tokenizing takes all cores: the `tokenizers` library
divides each block of sentences among its threads.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pipelines.files import whole_file
from pipelines.glue.reading import Sentences, TextFile, TfdsSplit
from pipelines.glue.tasks import GlueDataError
from pipelines.glue.tokens import TextTokenizer

_FORMAT = "glue-records-1"
_BLOCK = 10_000  # examples that are tokenized at once


def record_dtype(length: int) -> np.dtype:
    """One example: its tokens, how many there are, where the second sentence begins, its class."""
    return np.dtype(
        [
            ("tokens", "<i4", (length,)),
            ("length", "<i4"),
            ("second", "<i4"),
            ("label", "<i4"),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The records of one split; a data source of `dp_sparse`.

    Attributes:
        records: `[examples]` of `record_dtype`, in memory or mapped.
        counts: What was left out or cut, for anyone who runs the job.
        segments: Whether x has `segment_ids`, as BERT needs them.
    """

    records: np.ndarray
    counts: dict[str, int]
    segments: bool = False

    def __len__(self) -> int:
        return len(self.records)

    def gather(self, indices: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """x and y of the examples at `indices`, int32: `[batch, length]` each, and `[batch]`.

        `padding_mask` is 1 at tokens.
        """
        records = np.asarray(self.records[indices])
        tokens = records["tokens"]
        place = np.arange(tokens.shape[1], dtype=np.int32)
        there = place < records["length"][:, np.newaxis]
        x = {"token_ids": np.ascontiguousarray(tokens), "padding_mask": there.astype(np.int32)}
        if self.segments:
            second = place >= records["second"][:, np.newaxis]
            x["segment_ids"] = (there & second).astype(np.int32)
        return x, records["label"].astype(np.int32)

    def all(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Every example."""
        return self.gather(np.arange(len(self)))

    def at(self, rows: np.ndarray) -> "Tokens":
        """Those rows alone, in memory."""
        return dataclasses.replace(self, records=np.asarray(self.records[rows]))


def tokens_of(
    source: TextFile | TfdsSplit,
    split: str,
    tokenizer: TextTokenizer,
    length: int,
    directory: Path,
    *,
    segments: bool = False,
    progress: bool = True,
) -> Tokens:
    """The records of one split, tokenized unless `directory` has them.

    Args:
        source: The text.
        split: Its name, of the file and of the progress bar.
        tokenizer: Tokens, with special ones.
        length: Tokens of a record; longer examples are cut, the longer sentence of a pair first.
        directory: Where records are kept.
        segments: Whether the model reads segment ids.
        progress: Whether to show a progress bar.

    Raises:
        GlueDataError: The text cannot be used, or `length` has no room for a sentence.
    """
    depends = (_FORMAT, source.digest(), tokenizer.digest(), length)
    key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]
    path = directory / f"{source.task.name}-{split}-{key}.records"
    sidecar = path.with_suffix(".json")
    if not sidecar.is_file():
        records, counts = encoded(source.read(), tokenizer, length, split, progress)
        with whole_file(path) as file:
            records.tofile(file)
        with whole_file(sidecar) as file:
            file.write((json.dumps({"examples": len(records), **counts}) + "\n").encode())
    return _mapped(path, _counts(sidecar), length, segments)


def _counts(sidecar: Path) -> dict[str, int]:
    try:
        return dict(json.loads(sidecar.read_text()))
    except ValueError as error:
        raise GlueDataError(
            f"Expected the counts of tokens in {sidecar}, got {error}: remove it, and tokens are "
            "made again."
        ) from error


def encoded(
    sentences: Sentences, tokenizer: TextTokenizer, length: int, name: str, progress: bool
) -> tuple[np.ndarray, dict[str, int]]:
    """Records of all examples, `[examples]` of `record_dtype`, and what was left out or cut.

    Raises:
        GlueDataError: `length` has no room for a sentence.
    """
    special = tokenizer.tokenizer.num_special_tokens_to_add(len(sentences.texts) > 1)
    if length <= special + len(sentences.texts) - 1:
        raise GlueDataError(
            f"Expected data.length > {special + len(sentences.texts) - 1}, with room for "
            f"{special} special tokens, got data.length={length}."
        )
    tokenizer.tokenizer.enable_truncation(length)
    records = np.zeros(len(sentences), record_dtype(length))
    records["tokens"] = tokenizer.padding_id
    records["label"] = sentences.labels
    cut = 0
    with tqdm(total=len(records), desc=f"{name} tokens", disable=not progress) as bar:
        for begin in range(0, len(records), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            inputs: Any = [column[block] for column in sentences.texts]
            inputs = inputs[0] if len(inputs) == 1 else list(zip(*inputs, strict=True))
            cut += _fill(records[block], tokenizer.tokenizer.encode_batch_fast(inputs))
            bar.update(len(inputs))
    tokenizer.tokenizer.no_truncation()
    return records, {"cut to length": cut, **sentences.left_out}


def _fill(records: np.ndarray, encodings: list[Any]) -> int:
    """Writes tokens into records; returns how many examples were cut."""
    for record, encoding in zip(records, encodings, strict=True):
        ids, types = encoding.ids, encoding.type_ids
        record["tokens"][: len(ids)] = ids
        record["length"] = len(ids)
        record["second"] = types.index(1) if 1 in types else len(ids)
    return sum(bool(encoding.overflowing) for encoding in encodings)


def _mapped(path: Path, counts: dict[str, int], length: int, segments: bool) -> Tokens:
    examples = counts.pop("examples")
    wanted = examples * record_dtype(length).itemsize
    found = path.stat().st_size if path.is_file() else 0
    if found != wanted:
        raise GlueDataError(
            f"Expected {wanted} bytes in {path}, got {found}: remove it and {path.stem}.json, and "
            "it is made again."
        )
    records = np.memmap(path, record_dtype(length), mode="r")
    return Tokens(records, {name: count for name, count in counts.items() if count}, segments)
