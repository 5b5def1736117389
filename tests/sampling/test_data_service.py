"""Batches over tf.data service: the same as without it, each step once, or a clear error."""

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import OfflineBatches, PrivacyError, offline_sampling
from dp_sparse.core import translated
from dp_sparse.sampling import BatchPart
from dp_sparse.sampling.offline import batches as offline_batches
from tests.sampling.offline_folders import prepared, unpack
from tests.subprocesses import environment


def plan_on(source: OfflineBatches) -> dp_sparse.PrivacyPlan:
    budget = dp_sparse.PrivacyBudget(1.0, 1e-3)
    return dp_sparse.PrivacyPlan(budget, offline_sampling(source, shared=True)).with_noise(2.0)


def batches(folder: Path, data_service: str | None, first_step: int = 0) -> tf.data.Dataset:
    source = OfflineBatches(str(folder), unpack, data_service)
    return plan_on(source).sampling.batches(source, first_step=first_step)


def read(folder: Path, data_service: str | None, first_step: int = 0) -> list[Any]:
    with translated():
        return list(batches(folder, data_service, first_step).as_numpy_iterator())


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("steps", "bucket_steps", "stripes"), [(7, 3, 2), (40, 4, 3), (5, 9, 1)])
def test_as_without_it(tmp_path: Path, steps: int, bucket_steps: int, stripes: int) -> None:
    """From the beginning, and from within a bucket."""
    prepared(tmp_path, steps=steps, bucket_steps=bucket_steps, stripes=stripes)
    for first_step in (0, 4):
        assert_same(read(tmp_path, "local", first_step), read(tmp_path, None, first_step))


def test_each_time_that_it_is_read(tmp_path: Path) -> None:
    prepared(tmp_path)
    made = batches(tmp_path, "local")
    next(iter(made))  # one that is given up
    assert_same(list(made.as_numpy_iterator()), read(tmp_path, None))
    assert_same(list(made.as_numpy_iterator()), read(tmp_path, None))


def test_the_part_of_a_worker(tmp_path: Path) -> None:
    prepared(tmp_path)
    parts = []
    for address in ("local", None):
        source = OfflineBatches(str(tmp_path), unpack, address)
        made = plan_on(source).sampling.batches_of(source, BatchPart(10, 25, 0, 9), first_step=2)
        parts.append(list(made.as_numpy_iterator()))
    assert_same(*parts)


def test_trains(tmp_path: Path) -> None:
    prepared(tmp_path)
    source = OfflineBatches(str(tmp_path), lambda fields: (fields["x"], fields["y"]), "local")
    plan = plan_on(source)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    model.fit(plan.sampling.batches(source), epochs=2, verbose=0)
    assert model.optimizer.steps_left == 0


_WORKER = """
import sys
import tensorflow as tf
service = tf.data.experimental.service
worker = service.WorkerServer(service.WorkerConfig(sys.argv[1]))
print("up", flush=True)
worker.join()
"""


@contextlib.contextmanager
def workers(address: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of their own, killed in the end."""
    command = [sys.executable, "-c", _WORKER, address.removeprefix("grpc://")]
    started = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def append_all(reading: Iterator[Any], found: list[Any]) -> None:
    for batch in reading:
        found.append(batch)


def test_a_worker_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came is each step once, in order; the error says where to go on, and the rest is there.

    The service itself says nothing: it would wait for the dead one, and its steps would be gone.
    """
    monkeypatch.setattr(offline_batches, "_PATIENCE", 5.0)
    # 80 kB a batch, so that a worker cannot have sent its file before it is killed
    prepared(tmp_path, steps=300, bucket_steps=60, capacity=2_000)
    wanted = read(tmp_path, None)
    dispatcher = tf.data.experimental.service.DispatchServer()
    with workers(dispatcher.target, 2) as (first, _):
        reading = batches(tmp_path, dispatcher.target).as_numpy_iterator()
        found = [next(reading) for _ in range(3)]
        first.send_signal(signal.SIGKILL)
        first.wait()
        # without an error the other worker had all files, and every step must be here
        refused, rest = [], []
        try:
            with translated():
                append_all(reading, found)
        except PrivacyError as error:
            refused.append(str(error))
        if refused:
            assert "a worker is gone" in refused[0]
            assert 3 <= len(found) < 300
            assert_same(found, wanted[: len(found)])
            assert f"go on with first_step={len(found)}" in refused[0]
            rest = read(tmp_path, dispatcher.target, len(found))  # by the other worker
    assert_same([*found, *rest], wanted)


class TestRefused:
    def test_what_each_worker_reads_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without sharding two workers give each example twice."""
        prepared(tmp_path, steps=300, bucket_steps=60, capacity=2_000)
        policy = tf.data.experimental.service.ShardingPolicy
        distribute = tf.data.experimental.service.distribute

        def unsharded(mode: Any, *given: Any, **options: Any) -> Any:
            assert mode == policy.DYNAMIC
            return distribute(policy.OFF, *given, **options)

        monkeypatch.setattr(tf.data.experimental.service, "distribute", unsharded)
        with pytest.raises(PrivacyError, match=r"Expected each step once .* got step \d+ twice"):
            read(tmp_path, "local")

    def test_nobody_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(offline_batches, "_PATIENCE", 0.5)
        prepared(tmp_path)
        dispatcher = tf.data.experimental.service.DispatchServer()  # without workers
        for address in ("grpc://localhost:1", dispatcher.target):
            with pytest.raises(PrivacyError, match=f"Expected step 0 from .*{address}, got none"):
                read(tmp_path, address)

    @pytest.mark.parametrize("address", ["", "localhost:5000", "http://localhost:5000"])
    def test_no_address(self, tmp_path: Path, address: str) -> None:
        prepared(tmp_path)
        with pytest.raises(ValueError, match="Expected data_service='grpc://HOST:PORT' or 'local'"):
            OfflineBatches(str(tmp_path), unpack, address)

    @pytest.mark.parametrize("how", ["another draw", "twice", "changed"])
    def test_wrong_files(self, tmp_path: Path, how: str) -> None:
        """What a worker finds reaches the one who trains."""
        prepared(tmp_path / "a")
        prepared(tmp_path / "b", key=bytes(range(32))[::-1])
        name, other = "steps-00001-01.tfrecord", "steps-00000-01.tfrecord"
        content = bytearray((tmp_path / "a" / name).read_bytes())
        content[len(content) // 2] ^= 1
        new = {
            "another draw": (tmp_path / "b" / name).read_bytes(),
            "twice": (tmp_path / "a" / other).read_bytes(),
            "changed": bytes(content),
        }
        (tmp_path / "a" / name).write_bytes(new[how])
        message = {"another draw": "of this draw", "twice": "twice", "changed": "corrupted record"}
        with pytest.raises(Exception, match=message[how]):
            read(tmp_path / "a", "local")


class _Given:
    """Arrivals in a given order."""

    address = "somewhere"
    missing = offline_batches._Arrivals.missing

    def __init__(self, steps: Iterable[int]) -> None:
        self._steps = iter(steps)

    def next(self, step: int) -> Any:
        found = next(self._steps, None)
        if found is None:
            raise self.missing(step)  # type: ignore[arg-type]
        return found, 10 * found


@given(st.integers(0, 5), st.permutations(range(9)), st.data())
def test_any_order_and_any_loss(first: int, order: list[int], data: st.DataObject) -> None:
    """All steps in order; or those before the first that is lost or comes twice, and an error."""
    steps = [first + step for step in order]
    wanted = range(first, first + 9)
    got = list(offline_batches._sorted(_Given(steps), wanted, 9))  # type: ignore[arg-type]
    assert got == [(step, 10 * step) for step in wanted]
    lost = data.draw(st.sampled_from(steps))
    left = [step for step in steps if step != lost]
    got = []
    with pytest.raises(PrivacyError, match=f"Expected step {lost} .*first_step={lost}"):
        got.extend(offline_batches._sorted(_Given(left), wanted, 9))  # type: ignore[arg-type]
    twice = [*steps[:-1], data.draw(st.sampled_from(steps[:-1])), steps[-1]]
    with pytest.raises(PrivacyError, match="twice"):
        list(offline_batches._sorted(_Given(twice), wanted, 9))  # type: ignore[arg-type]


def test_memory_of_what_waits_is_bounded() -> None:
    """Others run far ahead of a step that does not come."""
    endless = _Given(itertools.count(1))
    with pytest.raises(PrivacyError, match="Expected step 0 "):
        list(offline_batches._sorted(endless, range(10**9), 64))  # type: ignore[arg-type]
    assert endless.next(0)[0] == 65
