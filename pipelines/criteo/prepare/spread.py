"""A shard: parsed, its coins thrown, its pairs of example and step written by bucket of steps.

Pairs go to files as large as a bucket, sorted by bucket, so memory does not depend on the shard.
All follows from the key, the number of the shard and its bytes: a worker that does it again writes
the same files. It keeps malformed lines apart, each with its number and reason.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse import offline
from pipelines.criteo.histograms import LookupCounts
from pipelines.criteo.parse import parse_lines
from pipelines.criteo.prepare.job import PAIR, Job, give_name, read_json, write_json, write_whole
from pipelines.criteo.records import PrepareError, Tally
from pipelines.criteo.schema import RECORD_DTYPE
from pipelines.criteo.shards import blocks_of, malformed_lines


def spread(job: Job, shard: int) -> None:
    """Writes the pairs of a shard, and a summary of what was found, unless they are there.

    Raises:
        PrepareError: The file is damaged or cut, or has no row.
    """
    if summary_of(job, shard) is not None:
        return
    draw = offline.OfflineDraw(job.key(), job.expected_batch_size / job.num_examples, job.steps)
    lines, parts = _Lines(job, shard), _Parts(job, shard)
    counted = LookupCounts(job.vocabularies) if job.counts(shard) else None
    with lines.quarantine:
        for chunk, records in enumerate(_chunks(lines)):
            if counted is not None:
                counted.add(records["categories"])
            places, steps = draw.of_chunk(f"shard {shard}", chunk)
            there = places < len(records)
            parts.add(steps[there], records[places[there]])
        parts.end()
    if not lines.tally.records:
        raise PrepareError(
            f"Expected rows in {job.inputs[shard]}, got {lines.tally.lines} lines and none that is "
            f"well-formed: {dict(lines.tally.quarantined)}. Get the file again, and start the same "
            "command again."
        )
    if lines.tally.quarantined:
        tf.io.gfile.makedirs(f"{job.output}/quarantine")
        give_name(lines.malformed, f"{job.output}/quarantine/shard-{shard:05d}.tsv")
    if counted is not None:
        write_whole(job.work(f"counts-{shard:05d}"), counted.values.tobytes())
    found = {
        "records": lines.tally.records,
        "digest": lines.digest.hexdigest(),
        "quarantined": lines.tally.report(),
        "pairs": parts.pairs,
    }
    write_json(_summary(job, shard), found)


def summary_of(job: Job, shard: int) -> Any:
    """What was found in a shard; None before it is spread.

    It has `records`, `digest` (SHA-256 of the decompressed bytes), `quarantined` (by reason) and
    `pairs`.
    """
    return read_json(_summary(job, shard))


def _summary(job: Job, shard: int) -> str:
    return job.work(f"spread-{shard:05d}.json")


def pairs_file(shard: int, file: int) -> str:
    """The name of a shard's file of pairs, whose pairs are sorted by bucket."""
    return f"pairs-{shard:05d}-{file:05d}"


def ranges_of(job: Job, shard: int, bucket: int) -> np.ndarray:
    """In each of a spread shard's files, the bucket's first pair and how many, int64 `[files, 2]`.

    One row of what all buckets together have, which may be large.
    """
    with tf.io.gfile.GFile(_ranges_file(job, shard), "rb") as file:
        size = file.size() // job.buckets
        file.seek(bucket * size)
        return np.frombuffer(file.read(size), np.int64).reshape(-1, 2)


def _ranges_file(job: Job, shard: int) -> str:
    return job.work(f"ranges-{shard:05d}")


class _Lines:
    """The well-formed records of a shard, in blocks, and what else was seen on the way."""

    def __init__(self, job: Job, shard: int) -> None:
        self.tally, self.digest = Tally(), hashlib.sha256()
        self.malformed = job.work(f"malformed-{shard:05d}")
        tf.io.gfile.makedirs(job.work(""))
        self.quarantine = tf.io.gfile.GFile(self.malformed, "wb")
        self._path, self._vocabularies = job.inputs[shard], job.vocabularies

    def __iter__(self) -> Iterator[np.ndarray]:
        try:
            for block in blocks_of(self._path, digest=self.digest):
                parsed = parse_lines(block, self._vocabularies)
                first = self.tally.lines + 1
                self.quarantine.write(malformed_lines(block, parsed.reasons, first))
                self.tally.add(parsed.reasons)
                yield parsed.records
        except PrepareError as error:
            raise PrepareError(
                f"{error} Start the same command again then: the other shards are kept."
            ) from error


def _chunks(lines: _Lines) -> Iterator[np.ndarray]:
    """Records in pieces of the draw's chunks; the last one may have fewer."""
    waiting, count = [np.zeros(0, RECORD_DTYPE)], 0
    for records in lines:
        waiting.append(records)
        count += len(records)
        while count >= offline.CHUNK:
            joined = np.concatenate(waiting)
            yield joined[: offline.CHUNK]
            waiting, count = [joined[offline.CHUNK :]], count - offline.CHUNK
    if count:
        yield np.concatenate(waiting)


class _Parts:
    """Pairs of a shard, written whenever as many as those of a bucket are together."""

    def __init__(self, job: Job, shard: int) -> None:
        self.pairs = 0
        self._counts: list[np.ndarray] = []  # of each file, its pairs by bucket
        self._job, self._shard = job, shard
        self._waiting: list[np.ndarray] = []
        self._bytes = 0

    def add(self, steps: np.ndarray, records: np.ndarray) -> None:
        """Takes the pairs of a chunk."""
        pairs = np.empty(len(steps), PAIR)
        pairs["step"], pairs["record"] = steps, records
        self._waiting.append(pairs)
        self._bytes += pairs.nbytes
        self.pairs += len(pairs)
        if self._bytes >= self._job.bucket_bytes:
            self._flush()

    def end(self) -> None:
        """Writes the rest, and where the pairs of each bucket are."""
        self._flush()
        counts = np.reshape(self._counts, (-1, self._job.buckets)).astype(np.int64)
        ranges = np.stack([np.cumsum(counts, axis=1) - counts, counts], axis=2)
        write_whole(_ranges_file(self._job, self._shard), ranges.transpose(1, 0, 2).tobytes())

    def _flush(self) -> None:
        """Writes what is waiting, sorted by bucket."""
        if not self._bytes:
            return
        pairs, self._waiting = np.concatenate(self._waiting), []
        pairs = pairs[np.argsort(pairs["step"] // self._job.bucket_steps, kind="stable")]
        name = pairs_file(self._shard, len(self._counts))
        write_whole(self._job.work(name), pairs.tobytes())
        buckets = pairs["step"] // self._job.bucket_steps
        self._counts.append(np.bincount(buckets, minlength=self._job.buckets))
        self._bytes = 0
