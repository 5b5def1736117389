"""The files of batches that were drawn before training: blocks of one step, and a manifest.

A block is one record of a TFRecord file, which checks its sum: the first 16 bytes of the draw's
name, the step and the number of examples as int64, then `capacity` fixed-width records, zeros after
the last example. Steps are cut into buckets of consecutive ones, and each bucket into stripes: step
i of a bucket is in stripe i modulo their number, so that several files are read at once and steps
keep their order. All numbers are little-endian. Files are as private as the data that they hold.
"""

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, synced

FORMAT = "dp-sparse-offline-poisson-1"
MANIFEST = "manifest.json"
HEADER = struct.Struct("<16sqq")
_FRAME = 16  # bytes that TFRecord adds to a record


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder of drawn batches holds.

    Attributes:
        draw_id: The name of the draw: SHA-256 of its key, in hexadecimal.
        num_examples: N, the examples of the data set.
        expected_batch_size: B; an example joins a step with probability B / N.
        steps: T.
        capacity: The most examples of a block.
        record: The fields of a record, as `numpy.dtype.descr`.
        bucket_steps: Steps of a bucket; the last one may have fewer.
        stripes: Files of a bucket.
        seeded: Whether a seed made the draw, for tests: private training refuses it.
        about: What else is known of the data, such as how many lines were left out.

    Examples:
        >>> import numpy as np
        >>> from dp_sparse import offline
        >>> manifest = offline.Manifest(
        ...     draw_id=offline.draw_id(offline.new_key()), num_examples=100,
        ...     expected_batch_size=10, steps=5, capacity=30, record=[("id", "<i8")],
        ...     bucket_steps=3, stripes=1)
        >>> [list(manifest.steps_of(bucket)) for bucket in range(manifest.buckets)]
        [[0, 1, 2], [3, 4]]
        >>> manifest.files_of(0)  # with their bytes
        [('steps-00000-00.tfrecord', 864)]
    """

    draw_id: str
    num_examples: int
    expected_batch_size: float
    steps: int
    capacity: int
    record: Sequence[Any]
    bucket_steps: int
    stripes: int
    seeded: bool = False
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype:
        """One record."""
        return np.dtype([tuple(_as_field(field)) for field in self.record])

    @property
    def schema(self) -> str:
        """SHA-256 of the record's fields, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.dtype.descr).encode()).hexdigest()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return HEADER.size + self.capacity * self.dtype.itemsize

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return -(-self.steps // self.bucket_steps)

    def steps_of(self, bucket: int) -> range:
        """The steps of a bucket."""
        first = bucket * self.bucket_steps
        return range(first, min(first + self.bucket_steps, self.steps))

    def files_of(self, bucket: int) -> list[tuple[str, int]]:
        """Names of a bucket's files, and the bytes of each."""
        count = len(self.steps_of(bucket))
        return [
            (
                f"steps-{bucket:05d}-{stripe:02d}.tfrecord",
                len(range(stripe, count, self.stripes)) * (self.block_bytes + _FRAME),
            )
            for stripe in range(self.stripes)
        ]

    def write(self, folder: str) -> None:
        """Writes it into a folder, whole or not at all: without it there are no batches."""
        described = {"format": FORMAT, "schema": self.schema, **dataclasses.asdict(self)}
        unfinished = f"{folder}/.{MANIFEST}.tmp"
        with tf.io.gfile.GFile(unfinished, "w") as file:
            file.write(json.dumps(described, indent=1) + "\n")
        _name(unfinished, folder, MANIFEST)


def read_manifest(folder: str) -> Manifest:
    """The manifest of a folder, once every file that it names was found, of its size.

    Raises:
        ValueError: There is none, it is of another format, or a file is missing or was cut.

    Examples:
        >>> from dp_sparse import offline
        >>> offline.read_manifest("/nowhere")
        Traceback (most recent call last):
        ValueError: Expected drawn batches, got no /nowhere/manifest.json: ...
    """
    path = f"{folder}/{MANIFEST}"
    if not tf.io.gfile.exists(path):
        raise ValueError(
            f"Expected drawn batches, got no {path}: their preparation did not end. Run it again."
        )
    try:
        with tf.io.gfile.GFile(path) as file:
            fields = json.loads(file.read())
        given, schema = fields.pop("format"), fields.pop("schema")
        manifest = Manifest(**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        given, schema, manifest = None, None, None
    if manifest is None or given != FORMAT or schema != manifest.schema:
        raise ValueError(f"Expected a manifest of format {FORMAT}, got {path}: prepare it again.")
    for bucket in range(manifest.buckets):
        for name, size in manifest.files_of(bucket):
            _check_size(f"{folder}/{name}", size)
    return manifest


def _check_size(path: str, size: int) -> None:
    try:
        found = tf.io.gfile.stat(path).length
    except tf.errors.NotFoundError:
        raise ValueError(f"Expected {path}, got no such file: prepare the data again.") from None
    if found != size:
        raise ValueError(
            f"Expected {size} bytes in {path}, got {found}: it was cut, or is of other data. "
            "Prepare the data again."
        )


def write_bucket(
    folder: str, manifest: Manifest, bucket: int, steps: np.ndarray, records: np.ndarray
) -> None:
    """Writes the files of one bucket, each whole or not at all.

    Args:
        folder: Where to.
        manifest: Of the whole folder; it is not written.
        bucket: Which bucket.
        steps: Of each record, int64 `[pairs]`, all of them in the bucket.
        records: Of `manifest.dtype`, `[pairs]`.

    Raises:
        PrivacyError: A step has more than `capacity` examples.
        ValueError: A step is of another bucket, there are not as many steps as records, or these
            have another dtype.

    Examples:
        >>> import numpy as np, os, tempfile
        >>> from dp_sparse import offline
        >>> folder, ids = tempfile.TemporaryDirectory(), np.array([(7,), (8,)], [("id", "<i8")])
        >>> manifest = offline.Manifest(
        ...     draw_id=64 * "0", num_examples=2, expected_batch_size=1, steps=3, capacity=2,
        ...     record=ids.dtype.descr, bucket_steps=3, stripes=1)
        >>> offline.write_bucket(folder.name, manifest, 0, np.array([0, 2]), ids)
        >>> os.listdir(folder.name)
        ['steps-00000-00.tfrecord']
    """
    _require_own(manifest, bucket, steps, records)
    for stripe, (name, _) in enumerate(manifest.files_of(bucket)):
        unfinished = f"{folder}/.{name}.tmp"
        with tf.io.TFRecordWriter(unfinished) as writer:
            own = manifest.steps_of(bucket)[stripe :: manifest.stripes]
            for block in _blocks(manifest, own, steps, records):
                writer.write(block)
        _name(unfinished, folder, name)


def _require_own(manifest: Manifest, bucket: int, steps: np.ndarray, records: np.ndarray) -> None:
    own = manifest.steps_of(bucket)
    if records.dtype != manifest.dtype:
        raise ValueError(
            f"Expected records of the manifest's dtype {manifest.dtype}, got {records.dtype}: "
            "fields of one example would be read as another's."
        )
    others = [step for step in (steps.min(), steps.max()) if step not in own] if len(steps) else []
    if others or len(steps) != len(records):
        got = f"one of step {others[0]}" if others else f"{len(steps)} steps for {len(records)}"
        raise ValueError(
            f"Expected records of the steps {own.start} to {own.stop - 1}, those of bucket "
            f"{bucket}, got {got}: an example would be lost."
        )


def _name(unfinished: str, folder: str, name: str) -> None:
    """Gives a file its name, once it is on the disk if that is a local one."""
    local = "://" not in folder
    if local:
        synced(unfinished)
    tf.io.gfile.rename(unfinished, f"{folder}/{name}", overwrite=True)
    if local:
        synced(folder)


def _blocks(
    manifest: Manifest, wanted: range, steps: np.ndarray, records: np.ndarray
) -> Iterator[bytes]:
    order = np.argsort(steps, kind="stable")
    sorted_steps = steps[order]
    width = manifest.dtype.itemsize
    name = bytes.fromhex(manifest.draw_id)[:16]
    for step in wanted:
        begin, end = np.searchsorted(sorted_steps, [step, step + 1])
        if end - begin > manifest.capacity:
            raise PrivacyError(
                f"Expected at most capacity={manifest.capacity} examples in a batch, got "
                f"{end - begin}: the preparation stops here, as delta assumes. Prepare with a "
                "larger capacity or batch size, and with a new key."
            )
        held = records[order[begin:end]].tobytes()
        yield HEADER.pack(name, step, end - begin) + held.ljust(manifest.capacity * width, b"\0")


def _as_field(field: Any) -> Any:
    """A field of a dtype as JSON has it: shapes are lists there."""
    return [tuple(part) if isinstance(part, list) else part for part in field]
