"""Reads batches that were drawn before training, in the order of their steps; O(batch) memory."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError, require
from dp_sparse.sampling.data_source import unpacked
from dp_sparse.sampling.marker import OWN_ORDER, SEEDED, Marker
from dp_sparse.sampling.offline.files import HEADER, Manifest, read_manifest

Unpack = Callable[[dict[str, tf.Tensor]], Any]


class OfflineBatches:
    """A folder of batches that a preparation drew, and how to read its records.

    Args:
        folder: A local folder, or any path of `tf.io.gfile`.
        unpack: Turns the fields of a batch, tensors `[capacity, ...]` by name, into `(x, y)` or
            `(x, y, sample_weight)`. It runs in TensorFlow, once a batch; padding is zeros.

    Attributes:
        manifest: What the folder holds.

    Raises:
        ValueError: The folder has no manifest, or a file of it is missing or was cut.

    Examples:
        >>> import dp_sparse, numpy as np, tempfile
        >>> from dp_sparse import offline
        >>> folder, key = tempfile.TemporaryDirectory(), offline.new_key()
        >>> clicks = np.array([(3, 1.0), (7, 0.0)], [("user", "<i4"), ("clicked", "<f4")])
        >>> manifest = offline.Manifest(
        ...     draw_id=offline.draw_id(key), num_examples=2, expected_batch_size=1, steps=4,
        ...     capacity=2, record=clicks.dtype.descr, bucket_steps=4, stripes=1)
        >>> places, steps = offline.OfflineDraw(key, 0.5, 4).of_chunk("clicks", 0)
        >>> there = places < 2
        >>> offline.write_bucket(folder.name, manifest, 0, steps[there], clicks[places[there]])
        >>> manifest.write(folder.name)
        >>> del key  # whoever keeps it knows the batches
        >>> source = dp_sparse.OfflineBatches(folder.name, lambda r: (r["user"], r["clicked"]))
        >>> sampling = dp_sparse.offline_sampling(source)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 0.1), sampling).calibrate()
        >>> [tuple(x.shape) for x, y, weights in plan.sampling.batches(source)]
        [(2,), (2,), (2,), (2,)]
    """

    def __init__(self, folder: str, unpack: Unpack) -> None:
        self.folder, self._unpack = str(folder).rstrip("/"), unpack
        self.manifest: Manifest = read_manifest(self.folder)

    def dataset(self, fingerprint: int, first_step: int, begin: int, end: int) -> tf.data.Dataset:
        """Batches from `first_step` on, their places from `begin` to `end`, with markers.

        Raises:
            PrivacyError: While iterating, when a block is of another draw or step.
        """
        manifest = self.manifest
        nonce = SEEDED if manifest.seeded else OWN_ORDER
        head = Marker(fingerprint, nonce, 0).of_examples(end - begin, begin)

        def batch(step: tf.Tensor, block: tf.Tensor) -> Any:
            count, records = self._checked(step, block)
            x, y, weights = unpacked(_as_tuple(self._unpack(_fields(manifest, records))))
            present = tf.cast(tf.range(manifest.capacity) < count, tf.float32)
            if weights is None:
                weights = present
            parts = tf.nest.map_structure(
                lambda leaf: tf.ensure_shape(leaf[begin:end], [end - begin, *leaf.shape[1:]]),
                (x, y, weights, present),
            )
            x, y, weights, present = parts
            mark = tf.constant(head) + tf.stack([[0, 0, step, 0]])
            weights = tf.nest.map_structure(lambda w: tf.cast(w, tf.float32), weights)
            return x, y, {"sample_weight": weights, "present": present, "marker": mark}

        steps = tf.data.Dataset.range(first_step, manifest.steps)
        blocks = tf.data.Dataset.zip(steps, self._blocks(first_step))
        batches = blocks.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        left = manifest.steps - first_step
        return batches.apply(tf.data.experimental.assert_cardinality(left)).prefetch(2)

    def _blocks(self, first_step: int) -> tf.data.Dataset:
        """The blocks from a step on; files are opened as they are needed."""
        manifest = self.manifest
        bucket, skipped = divmod(first_step, manifest.bucket_steps)
        names = [
            [f"{self.folder}/{name}" for name, _ in manifest.files_of(number)]
            for number in range(bucket, manifest.buckets)
        ]
        buckets = tf.data.Dataset.from_tensor_slices(names)

        def of_bucket(files: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(files).interleave(
                lambda file: tf.data.TFRecordDataset(file, buffer_size=2**20),
                cycle_length=manifest.stripes,
                block_length=1,
                num_parallel_calls=manifest.stripes,
                deterministic=True,
            )

        return buckets.flat_map(of_bucket).skip(skipped)

    def _checked(self, step: tf.Tensor, block: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The number of examples of a block, and its records, uint8 `[capacity, width]`."""
        manifest = self.manifest
        name = bytes.fromhex(manifest.draw_id)[:16]
        numbers = tf.io.decode_raw(tf.strings.substr(block, 16, 16), tf.int64)
        whole = tf.equal(tf.strings.length(block), manifest.block_bytes)
        own = tf.equal(tf.strings.substr(block, 0, 16), name)
        message = "Expected the block of step {} of this draw, got {} of {}: prepare it again."
        found = numbers[0], tf.where(own, "this draw", "another draw or format")
        checks = [require(whole & own & (numbers[0] == step), PrivacyError, message, step, *found)]
        with tf.control_dependencies(checks):
            records = tf.io.decode_raw(tf.strings.substr(block, HEADER.size, -1), tf.uint8)
        width = manifest.dtype.itemsize
        return tf.cast(numbers[1], tf.int32), tf.reshape(records, [manifest.capacity, width])


def _fields(manifest: Manifest, records: tf.Tensor) -> dict[str, tf.Tensor]:
    """Columns of uint8 `[capacity, width]` by the names of the record's fields."""
    fields: Mapping[str, Any] = manifest.dtype.fields or {}
    found = {}
    for name, (dtype, offset, *_) in fields.items():
        base, shape = dtype.subdtype or (dtype, ())
        columns = records[:, offset : offset + dtype.itemsize]
        by_entry = tf.reshape(columns, [manifest.capacity, *shape, base.itemsize])
        kind = tf.as_dtype(base.newbyteorder("="))
        found[name] = tf.bitcast(by_entry, kind) if base.itemsize > 1 else by_entry[..., 0]
    return found


def _as_tuple(example: Any) -> tuple[Any, ...]:
    if not isinstance(example, tuple):
        raise ValueError(
            f"Expected unpack to give (x, y) or (x, y, sample_weight), got {type(example)}."
        )
    return example
