"""A bucket of steps: its pairs read from the files of all shards, sorted by step, written."""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from dp_sparse import offline
from pipelines.criteo.prepare.job import Job, read_json, write_json
from pipelines.criteo.prepare.spread import PAIR


def collect(job: Job, bucket: int, ranges: Iterable[tuple[str, int, int]]) -> int:
    """Writes the batches of a bucket, unless they are there; returns how many pairs they hold.

    Args:
        job: The preparation.
        bucket: Which bucket.
        ranges: Where its pairs are: a file, the first pair and how many.

    Raises:
        PrivacyError: A batch is larger than the capacity.
    """
    summary = job.work(f"bucket-{bucket:05d}.json")
    found = read_json(summary)
    if found is not None:
        return int(found["pairs"])
    parts = [_read(job, *where) for where in sorted(ranges)]
    pairs = np.concatenate([np.zeros(0, PAIR), *parts])
    manifest = job.manifest(offline.draw_id(job.key()), {})
    offline.write_bucket(job.output, manifest, bucket, pairs["step"], pairs["record"])
    write_json(summary, {"pairs": len(pairs)})
    return len(pairs)


def _read(job: Job, name: str, first: int, count: int) -> np.ndarray:
    with tf.io.gfile.GFile(job.work(name), "rb") as file:
        file.seek(first * PAIR.itemsize)
        return np.frombuffer(file.read(count * PAIR.itemsize), PAIR)
