"""A bucket of steps: its pairs read from the files of all shards, sorted by step, written."""

from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from dp_sparse import offline
from pipelines.criteo.prepare.job import PAIR, Job, read_json, write_json
from pipelines.criteo.prepare.spread import pairs_file, ranges_of
from pipelines.criteo.records import PrepareError


def collect(job: Job, bucket: int, shards: Iterable[int]) -> int:
    """Writes the batches of a bucket, unless they are there; returns how many pairs they hold.

    Args:
        job: The preparation.
        bucket: Which bucket.
        shards: All of them, spread.

    Raises:
        PrivacyError: A batch is larger than the capacity.
        PrepareError: A file of pairs was cut.
    """
    summary = job.work(f"bucket-{bucket:05d}.json")
    found = read_json(summary)
    if found is not None:
        return int(found["pairs"])
    pairs = np.concatenate([*_read(job, bucket, sorted(shards))])
    manifest = job.manifest(offline.draw_id(job.key()), {})
    offline.write_bucket(job.output, manifest, bucket, pairs["step"], pairs["record"])
    write_json(summary, {"pairs": len(pairs)})
    return len(pairs)


def _read(job: Job, bucket: int, shards: Iterable[int]) -> Iterator[np.ndarray]:
    """The bucket's pairs in each file that has some."""
    yield np.empty(0, PAIR)
    for shard in shards:
        for file, (first, count) in enumerate(ranges_of(job, shard, bucket).tolist()):
            if count:
                yield _part(job.work(pairs_file(shard, file)), first, count)


def _part(path: str, first: int, count: int) -> np.ndarray:
    with tf.io.gfile.GFile(path, "rb") as file:
        if file.size() < (first + count) * PAIR.itemsize:
            raise PrepareError(
                f"Expected {first + count} pairs in {path} or more, got {file.size()} bytes: the "
                "file was cut. Remove the folder and its key, and begin anew."
            )
        file.seek(first * PAIR.itemsize)
        return np.frombuffer(file.read(count * PAIR.itemsize), PAIR)
