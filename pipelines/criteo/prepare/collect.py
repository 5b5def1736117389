"""A bucket of steps: its pairs read from the files of all shards, sorted by step, written."""

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from dp_sparse import offline
from pipelines.criteo.prepare.job import PAIR, Job, read_json, write_json
from pipelines.criteo.records import PrepareError


def collect(job: Job, bucket: int, ranges: Iterable[tuple[str, int, int]]) -> int:
    """Writes the batches of a bucket, unless they are there; returns how many pairs they hold.

    Args:
        job: The preparation.
        bucket: Which bucket.
        ranges: Where its pairs are: a file, the first pair and how many.

    Raises:
        PrivacyError: A batch is larger than the capacity.
        PrepareError: A file of pairs was cut.
    """
    summary = job.work(f"bucket-{bucket:05d}.json")
    found = read_json(summary)
    if found is not None:
        return int(found["pairs"])
    pairs = _read(job, sorted(ranges))
    manifest = job.manifest(offline.draw_id(job.key()), {})
    offline.write_bucket(job.output, manifest, bucket, pairs["step"], pairs["record"])
    write_json(summary, {"pairs": len(pairs)})
    return len(pairs)


def _read(job: Job, ranges: Sequence[tuple[str, int, int]]) -> np.ndarray:
    pairs = np.empty(sum(count for _, _, count in ranges), PAIR)
    begin = 0
    for name, first, count in ranges:
        with tf.io.gfile.GFile(job.work(name), "rb") as file:
            if file.size() < (first + count) * PAIR.itemsize:
                raise PrepareError(
                    f"Expected {first + count} pairs in {job.work(name)} or more, got "
                    f"{file.size()} bytes: the file was cut. Remove the folder and its key, and "
                    "begin anew."
                )
            file.seek(first * PAIR.itemsize)
            pairs[begin : begin + count] = np.frombuffer(file.read(count * PAIR.itemsize), PAIR)
        begin += count
    return pairs
