"""Reads batches that were drawn before training, in the order of their steps; O(batch) memory.

Batches that workers of tf.data service parse, put back into the order of their steps.

Files are handed out to the workers one by one (dynamic sharding), so each is read by one of them.
That service promises each element at most once and in no order: what a dead worker held is lost,
and the rest goes on as if nothing had been. So anyone who trains compares here: a batch leaves in
its turn, each step once, and a step that does not come ends the run. Without sharding, every worker
would read all files, and each example would be used as often as there are workers.

Time is that of one copy of a batch; memory that of the batches which came before their turn.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError, marked, require, translated
from dp_sparse.sampling import input_guard, row_check
from dp_sparse.sampling.batch import OWN_ORDER, SEEDED, Marker, weight_check
from dp_sparse.sampling.data_source import unpacked
from dp_sparse.sampling.offline.files import HEADER, Manifest, read_manifest

LOCAL = "local"
_LOCAL_WORKERS = 2
_PATIENCE = 120.0  # seconds without any batch
_MOST_BYTES = 2**31  # of batches before their turn
_service = tf.data.experimental.service
Unpack = Callable[[dict[str, tf.Tensor]], Any]


class DataService:
    """A tf.data service: of other processes, or a dispatcher and two workers within this one.

    Args:
        address: `grpc://HOST:PORT` of a dispatcher, or `local`.

    Raises:
        ValueError: It is neither.
    """

    def __init__(self, address: str) -> None:
        if address != LOCAL and not address.startswith("grpc://"):
            raise ValueError(
                f"Expected data_service='grpc://HOST:PORT' or '{LOCAL}', got "
                f"data_service={address!r}."
            )
        self.address, self._servers = address, []
        if address == LOCAL:
            dispatcher = _service.DispatchServer()
            self.address = dispatcher.target
            config = _service.WorkerConfig(dispatcher.target.removeprefix("grpc://"))
            workers = [_service.WorkerServer(config) for _ in range(_LOCAL_WORKERS)]
            self._servers = [dispatcher, *workers]  # as long as this object

    def in_order(
        self, batches: tf.data.Dataset, steps: range, bytes_of_batch: int
    ) -> tf.data.Dataset:
        """What workers make of `batches`, from the first step to the last, each once.

        Args:
            batches: Each with its step first, in any order; its sources are divided among workers.
            steps: The steps that are wanted.
            bytes_of_batch: How large one is.

        Raises:
            PrivacyError: While iterating, when a step is missing or comes twice.
        """
        most = max(64, _MOST_BYTES // bytes_of_batch)

        def generate() -> Iterator[Any]:
            arrivals = _Arrivals(batches, self.address)
            with marked():
                try:
                    yield from _sorted(arrivals, steps, most)
                finally:
                    arrivals.stop()

        return tf.data.Dataset.from_generator(generate, output_signature=batches.element_spec)


class _Arrivals:
    """Batches as they come, in a thread of its own, since the service may wait for ever."""

    def __init__(self, batches: tf.data.Dataset, address: str) -> None:
        self.address = address
        self._batches = batches
        self._found: queue.Queue[Any] = queue.Queue(2)
        self._stopped = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, step: int) -> Any:
        """The next batch; the step is the one that is waited for.

        Raises:
            PrivacyError: There is none.
        """
        try:
            found = self._found.get(timeout=_PATIENCE)
        except queue.Empty:
            found = None
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise self.missing(step)
        return found

    def missing(self, step: int) -> PrivacyError:
        """A step that should have come."""
        return PrivacyError(
            f"Expected step {step} from the data service at {self.address}, got none: a worker is "
            f"gone or far behind, or cannot read the files. Steps before it were used once each; "
            f"see to the workers, and go on with first_step={step}."
        )

    def stop(self) -> None:
        """Takes no more."""
        self._stopped.set()

    def _read(self) -> None:
        distribute = _service.distribute(
            _service.ShardingPolicy.DYNAMIC, self.address, compression=None
        )
        try:
            with translated():
                for batch in self._batches.apply(distribute).as_numpy_iterator():
                    if not self._put(batch):
                        return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, found: Any) -> bool:
        while not self._stopped.is_set():
            try:
                self._found.put(found, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _sorted(arrivals: _Arrivals, steps: range, most: int) -> Iterator[Any]:
    waiting: dict[int, Any] = {}
    for step in steps:
        while step not in waiting:
            if len(waiting) >= most:
                raise arrivals.missing(step)
            batch = arrivals.next(step)
            found = int(batch[0])
            if found in waiting or found < step:
                raise PrivacyError(
                    f"Expected each step once from the data service at {arrivals.address}, got "
                    f"step {found} twice: a file is there twice. Prepare the data again."
                )
            waiting[found] = batch
        yield waiting.pop(step)


class OfflineBatches:
    """A folder of batches that a preparation drew, and how to read its records.

    Args:
        folder: A local folder, or any path of `tf.io.gfile`.
        unpack: Turns the fields of a batch, tensors `[capacity, ...]` by name, into `(x, y)` or
            `(x, y, sample_weight)`. It runs in TensorFlow, once a batch; padding is zeros.
        data_service: Where batches are read and parsed: the dispatcher of a tf.data service,
            `grpc://HOST:PORT`, whose workers see the folder and run `unpack` without Python; or
            `local` for one within this process; or None for no service. Batches are the same, and
            a worker that dies ends the run with an error. The service sees the data.

    Attributes:
        manifest: What the folder holds.

    Raises:
        ValueError: The folder has no manifest, or a file of it is missing or was cut; or
            `data_service` is no address.

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
        >>> del key  # anyone who keeps it knows the batches
        >>> source = dp_sparse.OfflineBatches(folder.name, lambda r: (r["user"], r["clicked"]))
        >>> sampling = dp_sparse.offline_sampling(source)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 0.1), sampling).calibrate()
        >>> [tuple(x.shape) for x, y, weights in plan.sampling.batches(source)]
        [(2,), (2,), (2,), (2,)]
    """

    def __init__(self, folder: str, unpack: Unpack, data_service: str | None = None) -> None:
        self.folder, self._unpack = str(folder).rstrip("/"), unpack
        self.manifest: Manifest = read_manifest(self.folder)
        self._service = None if data_service is None else DataService(data_service)

    def dataset(self, fingerprint: int, first_step: int, begin: int, end: int) -> tf.data.Dataset:
        """Batches from `first_step` on, their places from `begin` to `end`, with markers.

        Raises:
            PrivacyError: While iterating, when a block is of another draw or step, or does not come
                from the data service.
        """
        manifest = self.manifest
        nonce = SEEDED if manifest.seeded else OWN_ORDER
        head = Marker(fingerprint, nonce, 0).of_examples(end - begin, begin)

        def marked(step: tf.Tensor, batch: tuple[Any, ...]) -> Any:
            found, x, y, weights, present = batch
            message = "Expected the block of step {}, got that of {}: prepare it again."
            with tf.control_dependencies(
                [require(found == step, PrivacyError, message, step, found)]
            ):
                mark = tf.constant(head) + tf.stack([[0, 0, step, 0]])
            return x, y, {"sample_weight": weights, "present": present, "marker": mark}

        steps = tf.data.Dataset.range(first_step, manifest.steps)
        read = tf.data.Dataset.zip(steps, self._batches(first_step, begin, end))
        left = manifest.steps - first_step
        run = read.map(marked).apply(tf.data.experimental.assert_cardinality(left)).prefetch(2)
        return input_guard.own(run)

    def _batches(self, first_step: int, begin: int, end: int) -> tf.data.Dataset:
        """In the order of steps: the step, x, y, weights and presence."""
        parse = functools.partial(self._parsed, first_step, begin, end)
        if self._service is None:
            blocks = self._blocks(first_step)
            batches = blocks.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            input_guard.check_functions(batches, "unpack of OfflineBatches")
            return batches
        files = tf.data.Dataset.from_tensor_slices(list(chain(*self._files(first_step))))
        blocks = files.flat_map(_read_file)  # each file on one worker
        batches = blocks.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        input_guard.check_functions(batches, "unpack of OfflineBatches")
        wanted = batches.filter(lambda step, *_: step >= first_step)
        steps = range(first_step, self.manifest.steps)
        return self._service.in_order(wanted, steps, self.manifest.block_bytes)

    def _parsed(self, first_step: int, begin: int, end: int, block: tf.Tensor) -> tuple[Any, ...]:
        manifest = self.manifest
        step, count, records = self._checked(block)
        fields = _fields(manifest, records)
        rows = _as_tuple(self._unpack(fields))
        x, y, weights = unpacked(rows)
        present = tf.cast(tf.range(manifest.capacity) < count, tf.float32)
        weights = present if weights is None else weights
        with tf.control_dependencies(_row_checks((x, y, weights), manifest.capacity)):
            same = row_check.same_rows_of(self._unpack, fields, rows, step - first_step)
        with tf.control_dependencies([same]):
            x, y, weights = tf.nest.map_structure(tf.identity, (x, y, weights))
        weights = _checked_weights(weights, count, step)
        x, y, weights, present = tf.nest.map_structure(
            lambda leaf: tf.ensure_shape(leaf[begin:end], [end - begin, *leaf.shape[1:]]),
            (x, y, weights, present),
        )
        return step, x, y, weights, present

    def _files(self, first_step: int) -> list[list[str]]:
        """The files of each bucket, from that of a step on."""
        manifest = self.manifest
        buckets = range(first_step // manifest.bucket_steps, manifest.buckets)
        return [[f"{self.folder}/{name}" for name, _ in manifest.files_of(k)] for k in buckets]

    def _blocks(self, first_step: int) -> tf.data.Dataset:
        """The blocks from a step on; files are opened as they are needed."""
        manifest = self.manifest
        buckets = tf.data.Dataset.from_tensor_slices(self._files(first_step))

        def of_bucket(files: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(files).interleave(
                _read_file,
                cycle_length=manifest.stripes,
                block_length=1,
                num_parallel_calls=manifest.stripes,
                deterministic=True,
            )

        return buckets.flat_map(of_bucket).skip(first_step % manifest.bucket_steps)

    def _checked(self, block: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The step of a block, the number of its examples, its records `[capacity, width]`."""
        manifest = self.manifest
        name = bytes.fromhex(manifest.draw_id)[:16]
        numbers = tf.io.decode_raw(tf.strings.substr(block, 16, 16), tf.int64)
        whole = tf.equal(tf.strings.length(block), manifest.block_bytes)
        own = tf.equal(tf.strings.substr(block, 0, 16), name)
        message = (
            "Expected the blocks of this draw, got one of another draw or format: prepare again."
        )
        with tf.control_dependencies([require(whole & own, PrivacyError, message)]):
            records = tf.io.decode_raw(tf.strings.substr(block, HEADER.size, -1), tf.uint8)
        shape = [manifest.capacity, manifest.dtype.itemsize]
        return numbers[0], tf.cast(numbers[1], tf.int32), tf.reshape(records, shape)


def _read_file(path: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(path, buffer_size=2**20)


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


def _row_checks(example: tuple[Any, ...], capacity: int) -> list[tf.Operation]:
    """Fail unless each leaf has a row for each place: what is longer would be cut.

    Raises:
        ValueError: That is known from its shape.
    """
    message = (
        f"Expected unpack to keep the {capacity} rows that it is given, got {{}} in one of its "
        "arrays: keep the leading dimension."
    )
    checks = []
    for leaf in map(tf.convert_to_tensor, tf.nest.flatten(example)):
        if leaf.shape.rank == 0 or leaf.shape[0] not in (None, capacity):
            raise ValueError(message.format(f"shape {leaf.shape}"))
        rows = tf.shape(leaf)[0]
        checks.append(require(tf.equal(rows, capacity), ValueError, message, rows))
    return checks


def _checked_weights(weights: Any, count: tf.Tensor, step: tf.Tensor) -> Any:
    """float32, once those of the examples that are there were checked."""
    weights = tf.nest.map_structure(lambda leaf: tf.cast(leaf, tf.float32), weights)
    own = [weight_check(leaf[:count], step) for leaf in tf.nest.flatten(weights)]
    with tf.control_dependencies(own):
        return tf.nest.map_structure(tf.identity, weights)


def _as_tuple(example: Any) -> tuple[Any, ...]:
    if not isinstance(example, tuple):
        raise ValueError(
            f"Expected unpack to give (x, y) or (x, y, sample_weight), got {type(example)}."
        )
    return example
