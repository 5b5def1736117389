"""Batches that workers of tf.data service parse, put back into the order of their steps.

Files are handed out to the workers one by one (dynamic sharding), so each is read by one of them.
That service promises each element at most once and in no order: what a dead worker held is lost,
and the rest goes on as if nothing had been. So whoever trains compares here: a batch leaves in its
turn, each step once, and a step that does not come ends the run. Without sharding, every worker
would read all files, and each example would be used as often as there are workers.

Time is that of one copy of a batch; memory that of the batches which came before their turn.
"""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError, marked, translated

LOCAL = "local"
_LOCAL_WORKERS = 2
_PATIENCE = 120.0  # seconds without any batch
_MOST_BYTES = 2**31  # of batches before their turn
_service = tf.data.experimental.service


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
