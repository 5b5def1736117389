"""Rows of TSV files as a stream: each line an example in its place, read in order, not prepared.

The order follows from the files' order and their numbers of lines alone: files are read one after
the other, or a few at once in turns of as many lines. A malformed line keeps its place as padding,
an example of weight 0. So anyone who replaces one row by padding moves no other, which is what
`StreamSampling` assumes of neighbours; leaving malformed lines out, or turns of as many bytes,
would move all rows behind one.

Blocks are parsed in parallel. Memory is that of a few blocks and a batch.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import dp_sparse
from pipelines.criteo.days import check_different, check_order
from pipelines.criteo.parse import WELL_FORMED, parse_lines
from pipelines.criteo.prepare.job import write_whole
from pipelines.criteo.records import Tally
from pipelines.criteo.schema import RECORD_DTYPE
from pipelines.criteo.shards import blocks_of, malformed_lines

LINES = 4096  # of a block, and of a turn
_AHEAD, _THREADS = 4, 2

Unpack = Callable[[np.ndarray], tuple[Any, Any]]
Rows = tuple[np.ndarray, np.ndarray]  # records, zeros for malformed lines, and weights


class RawRows:
    """Lines of files in their order, for `dp_sparse.StreamSampling`.

    Args:
        paths: TSV files, plain or gzip, in the order of time.
        num_examples: N, all lines of the files, malformed ones too; checked when a pass ends.
        vocabularies: Hash buckets of each categorical feature.
        unpack: From records to `(x, y)`.
        quarantine: A folder for malformed lines, as private as the data.
        files_at_once: How many files are read in turns.

    Raises:
        PrepareError: A file is missing, empty, there twice or not in the order of days.
    """

    in_order = True  # going back reads the files anew

    def __init__(
        self,
        paths: Sequence[str],
        num_examples: int,
        vocabularies: Sequence[int],
        unpack: Unpack,
        quarantine: str,
        files_at_once: int = 1,
    ) -> None:
        check_order(paths)
        check_different(paths)
        self._given = (paths, num_examples, vocabularies, unpack, quarantine, files_at_once)
        self._paths, self._num_examples, self._vocabularies = paths, num_examples, vocabularies
        self._unpack, self._quarantine, self._files_at_once = unpack, quarantine, files_at_once
        self._lock = threading.Lock()
        self._rows: Iterator[Rows] = iter(())
        self._position = num_examples  # so that the first batch begins a pass
        self._waiting = _nothing()

    def __len__(self) -> int:
        return self._num_examples

    def unpacked_by(self, unpack: Unpack) -> "RawRows":
        """The same rows, unpacked in another way."""
        paths, num_examples, vocabularies, _, *others = self._given
        return RawRows(paths, num_examples, vocabularies, unpack, *others)

    def gather(self, indices: np.ndarray) -> tuple[Any, Any, np.ndarray]:
        """`(x, y, sample_weight)` of consecutive lines; going back begins a new pass.

        Raises:
            ValueError: The lines are not consecutive.
            PrivacyError: The files have more or fewer lines than was declared.
        """
        count = len(indices)
        if not count:
            return self._examples(*_nothing())
        begin = int(indices[0])
        if not np.array_equal(indices, np.arange(begin, begin + count)):
            raise ValueError(
                "Expected consecutive lines of raw rows, got others: only StreamSampling reads "
                "them. Prepare the rows for Poisson sampling."
            )
        with self._lock:
            if begin != self._position:
                self._begin_at(begin)
            taken = self._take(count)
            self._position += count
            if self._position == self._num_examples:
                self._check_end()
        return self._examples(*taken)

    def _examples(self, records: np.ndarray, weights: np.ndarray) -> tuple[Any, Any, np.ndarray]:
        return (*self._unpack(records), weights)

    def _begin_at(self, line: int) -> None:
        """Reads from a line on; blocks before it are not parsed again."""
        self._tally = Tally()
        self._rows, self._waiting = self._parsed(line), _nothing()
        self._position = line

    def _take(self, count: int) -> Rows:
        parts, there = [self._waiting], len(self._waiting[0])
        while there < count:
            part = next(self._rows, None)
            if part is None:
                raise dp_sparse.PrivacyError(
                    f"Expected num_examples={self._num_examples} lines in the stream, got "
                    f"{self._position + there}: a file was cut, or the number is wrong."
                )
            parts.append(part)
            there += len(part[0])
        records, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
        self._waiting = records[count:], weights[count:]
        return records[:count], weights[:count]

    def _check_end(self) -> None:
        more = len(self._waiting[0]) + sum(len(records) for records, _ in self._rows)
        if more:
            raise dp_sparse.PrivacyError(
                f"Expected the stream to end after num_examples={self._num_examples} lines, got "
                f"{self._num_examples + more}: give the true number."
            )
        if self._tally.quarantined:
            reasons = {str(reason): count for reason, count in self._tally.quarantined.items()}
            warnings.warn(
                f"Malformed lines were padding in this pass, and are in {self._quarantine}: "
                f"{reasons}. No epsilon covers these numbers.",
                stacklevel=2,
            )

    def _parsed(self, skipped: int) -> Iterator[Rows]:
        """Records and weights of each block, in order; several are parsed at once."""
        pending: collections.deque[Any] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for block in in_turns(self._paths, self._files_at_once):
                if block.count <= skipped:
                    skipped -= block.count
                    continue
                pending.append(pool.submit(self._parse, block, skipped))
                skipped = 0
                if len(pending) > _AHEAD:
                    yield self._noted(pending.popleft())
            while pending:
                yield self._noted(pending.popleft())

    def _parse(self, block: "Block", skipped: int) -> tuple[Rows, np.ndarray]:
        parsed = parse_lines(block.lines, self._vocabularies)
        there = parsed.reasons == WELL_FORMED
        records = np.zeros(block.count, RECORD_DTYPE)
        records[there] = parsed.records
        malformed = malformed_lines(block.lines, parsed.reasons, block.first + 1)
        if malformed:
            name = f"file-{block.file:05d}-{block.first:012d}.tsv"
            write_whole(f"{self._quarantine}/{name}", malformed)
        rows = records[skipped:], there[skipped:].astype(np.float32)
        return rows, parsed.reasons[skipped:]

    def _noted(self, parsed: "concurrent.futures.Future[tuple[Rows, np.ndarray]]") -> Rows:
        rows, reasons = parsed.result()
        self._tally.add(reasons)
        return rows


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines of a file.

    Attributes:
        file: Which one.
        first: How many lines of it are before.
        count: How many lines.
        lines: Their bytes.
    """

    file: int
    first: int
    count: int
    lines: bytes


def in_turns(paths: Sequence[str], files_at_once: int) -> Iterator[Block]:
    """The blocks of all files: so many files take turns, and one that ends makes room for another.

    Nothing in the order depends on what the lines hold, or on how long they are.
    """
    unopened = (_blocks_of(file, path) for file, path in enumerate(paths))
    opened = collections.deque(itertools.islice(unopened, files_at_once))
    while opened:
        file = opened.popleft()
        block = next(file, None)
        if block is not None:
            yield block
            opened.append(file)
        else:
            opened.extendleft(itertools.islice(unopened, 1))


def _blocks_of(file: int, path: str) -> Iterator[Block]:
    """Blocks of exactly `LINES` lines; the last one may have fewer."""
    first, rest = 0, b""
    for read in blocks_of(path):
        rest += read
        ends = 1 + np.flatnonzero(np.frombuffer(rest, np.uint8) == ord("\n"))[LINES - 1 :: LINES]
        for begin, end in itertools.pairwise([0, *ends.tolist()]):
            yield Block(file, first, LINES, rest[begin:end])
            first += LINES
        rest = rest[ends[-1] :] if len(ends) else rest
    count = rest.count(b"\n") + (not rest.endswith(b"\n"))
    if rest:
        yield Block(file, first, count, rest)


def _nothing() -> Rows:
    return np.zeros(0, RECORD_DTYPE), np.zeros(0, np.float32)
