"""One preparation: what is read, how it is drawn, and which files it keeps until it ends.

A job holds the path of the key, never the key, so it may go into options, pickles and logs.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import dp_sparse
from dp_sparse import offline
from pipelines.criteo.records import PrepareError
from pipelines.criteo.schema import RECORD_DTYPE, TABLE3_VOCABULARIES, validate_vocabularies
from pipelines.files import require_disk

BUCKET_BYTES = 2**25  # of pairs that are sorted at once, or a step's
MOST_BUCKETS = 2**12  # beyond 2**37 bytes of pairs, buckets grow instead
_LAYOUT = 2  # of what a job keeps until it ends: no other version goes on with it
HISTOGRAM = "histogram.npz"  # in the output
PAIR = np.dtype([("step", "<i8"), ("record", RECORD_DTYPE)])


@dataclasses.dataclass(frozen=True)
class Job:
    """What is prepared.

    Attributes:
        inputs: Files of tab-separated rows, plain or gzip; each is a shard.
        output: The folder of the batches.
        key_file: Where the secret key is until the job ends; outside the output.
        num_examples: N, the well-formed rows of all inputs; declared, and checked at the end.
        expected_batch_size: B.
        steps: T.
        capacity: The most examples of a batch.
        vocabularies: Hash buckets of each categorical feature.
        stripes: Files of a bucket, which are read at once.
        seeded: Whether a seed made the key, for tests.
        histogram_noise: The noise multiplier of a noisy histogram of lookups, made in the same
            pass; None for no histogram.
        counted: How many of the inputs, from the first on, the histogram counts; None for all.
    """

    inputs: tuple[str, ...]
    output: str
    key_file: str
    num_examples: int
    expected_batch_size: float
    steps: int
    capacity: int
    vocabularies: tuple[int, ...] = TABLE3_VOCABULARIES
    stripes: int = 2
    seeded: bool = False
    histogram_noise: float | None = None
    counted: int | None = None

    def counts(self, shard: int) -> bool:
        """Whether the histogram counts this input."""
        counted = len(self.inputs) if self.counted is None else self.counted
        return self.histogram_noise is not None and shard < counted

    @property
    def bucket_bytes(self) -> float:
        """Bytes of pairs that a worker has in memory at once, a few times over."""
        return max(BUCKET_BYTES, self.steps * self._step_bytes / MOST_BUCKETS)

    @property
    def bucket_steps(self) -> int:
        """Steps of a bucket."""
        return min(self.steps, max(1, int(self.bucket_bytes / self._step_bytes)))

    @property
    def _step_bytes(self) -> float:
        return self.expected_batch_size * PAIR.itemsize

    @property
    def buckets(self) -> int:
        """How many buckets of steps there are."""
        return -(-self.steps // self.bucket_steps)

    def manifest(self, draw_id: str, about: Mapping[str, Any]) -> offline.Manifest:
        """What the output holds in the end."""
        return offline.Manifest(
            draw_id=draw_id,
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            steps=self.steps,
            capacity=self.capacity,
            record=RECORD_DTYPE.descr,
            bucket_steps=self.bucket_steps,
            stripes=self.stripes,
            seeded=self.seeded,
            about={"vocabularies": self.vocabularies, **about},
        )

    def key(self) -> bytes:
        """The secret key, from its file."""
        return bytes.fromhex(self._key_lines()[0])

    def owns_key(self) -> bool:
        """Whether the file of the key was written whole, for this job."""
        return self._key_lines()[1:] == [self.fingerprint]

    def _key_lines(self) -> list[str]:
        with tf.io.gfile.GFile(self.key_file, "rb") as file:
            return list(file.read().decode().splitlines())

    def work(self, name: str) -> str:
        """The path of a file that is kept until the job ends."""
        return f"{self.output}/.work/{name}"

    @property
    def fingerprint(self) -> str:
        """What must be the same when a job is resumed."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k != "key_file"}
        fields["layout"] = _LAYOUT
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def new_job(
    inputs: Sequence[str],
    output: str,
    *,
    num_examples: int,
    batch_size: float,
    epochs: float,
    key_file: str | None = None,
    vocabularies: Sequence[int] = TABLE3_VOCABULARIES,
    seeded: bool = False,
    histogram_noise: float | None = None,
    counted: int | None = None,
) -> Job:
    """A checked job, of the steps that `epochs` expected passes over the data take.

    Raises:
        PrepareError: An input is missing, empty or given twice, the key would be in the output, or
            the histogram's noise is not positive.
        ValueError: A number is out of its range.
        OSError: A local disk has no room for a job that begins.
    """
    output = str(output).rstrip("/")
    key_file = key_file or f"{output}.key"
    _check_inputs(inputs)
    inside = Path(key_file).absolute().is_relative_to(Path(output).absolute())
    if inside:
        raise PrepareError(
            f"Expected key_file outside the output, got {key_file}: anyone who copies the batches "
            "would copy their key. Name another folder."
        )
    if histogram_noise is not None and not 0 < histogram_noise < math.inf:
        raise PrepareError(f"Expected histogram_noise > 0, got histogram_noise={histogram_noise}.")
    sampling = dp_sparse.PoissonSampling(num_examples, batch_size, epochs=epochs)
    if "://" not in output and not Path(output).exists():  # otherwise some of it is there
        pairs = sampling.steps * sampling.expected_batch_size * PAIR.itemsize
        batches = sampling.steps * sampling.batch_capacity * RECORD_DTYPE.itemsize
        what = f"batches of {num_examples:,} rows and what is sorted on the way"
        require_disk(Path(output).parent, pairs + batches, what)
    return Job(
        inputs=tuple(map(str, inputs)),
        output=output,
        key_file=str(key_file),
        num_examples=sampling.num_examples,
        expected_batch_size=sampling.expected_batch_size,
        steps=sampling.steps,
        capacity=sampling.batch_capacity,
        vocabularies=validate_vocabularies(vocabularies),
        seeded=seeded,
        histogram_noise=histogram_noise,
        counted=counted,
    )


def _check_inputs(inputs: Sequence[str]) -> None:
    if not inputs:
        raise PrepareError("Expected Criteo files to prepare, got none: pass --input=FILE ...")
    twice = sorted({str(path) for path in inputs if list(inputs).count(path) > 1})
    if twice:
        raise PrepareError(f"Expected each input once, got {twice[0]} twice: leave one out.")
    for path in inputs:
        if not tf.io.gfile.exists(path) or tf.io.gfile.isdir(path):
            raise PrepareError(f"No such file: {path}. Name Criteo TSV files, plain or gzip.")
        if tf.io.gfile.stat(path).length == 0:
            raise PrepareError(f"{path} is empty: it has no rows to prepare.")


def write_whole(path: str, content: bytes) -> None:
    """Writes a file under another name first, and then renames it."""
    folder, name = os.path.split(path)
    tf.io.gfile.makedirs(folder)
    unfinished = f"{folder}/.{name}.tmp"
    with tf.io.gfile.GFile(unfinished, "wb") as file:
        file.write(content)
    give_name(unfinished, path)


def give_name(unfinished: str, path: str) -> None:
    """Renames a file that was written whole; a local one is on the disk before."""
    if "://" not in path:
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
    tf.io.gfile.rename(unfinished, path, overwrite=True)


def write_json(path: str, content: Any) -> None:
    """Writes JSON, whole or not at all."""
    write_whole(path, f"{json.dumps(content)}\n".encode())


def read_json(path: str) -> Any:
    """JSON that was written whole, or None if there is none yet."""
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        return json.loads(file.read())
