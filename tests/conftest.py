"""What all tests have: four devices on one CPU, before TensorFlow looks for them, and a quiet log.

Fixtures that several folders take are here, too.
"""

import gc
import hashlib
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# On a CPU TensorFlow has convolutions with channels first, and dilated transposed ones, through
# oneDNN alone, which it takes by itself on processors with AVX-512 VNNI or AMX only.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.optimizers import ledger
from tests import tiers

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


def _untuned(dataset: tf.data.Dataset) -> Iterator[Any]:
    """An iterator whose deletion is not waited for.

    TensorFlow waits until the thread that tunes an iterator's buffers wakes up, and that thread
    sleeps the longer the older the iterator is.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return _ITERATOR(dataset.with_options(options))


_ITERATOR = tf.data.Dataset.__iter__
tf.data.Dataset.__iter__ = _untuned

# Graphs are many small objects, which the collector would look through again and again: a seventh
# of the time of a long run. What tests leave behind is freed every 20 seconds.
gc.set_threshold(200_000, 50, 50)
_COLLECTED_AT = [time.monotonic()]


def pytest_runtest_teardown() -> None:
    """Frees models of tests that are over: each holds some 20 MB of graphs."""
    if time.monotonic() > _COLLECTED_AT[0] + 20:
        gc.collect()
        _COLLECTED_AT[0] = time.monotonic()


def pytest_collection_finish() -> None:
    """What is there before the first test stays: modules, and the tests themselves."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every normal is 0."""

    def mean(total: tf.Tensor, deviation: float, divisor: float, *_: Any) -> tf.Tensor:
        return tf.cast(total / divisor, tf.float32)

    monkeypatch.setattr(noise, "normal", lambda draw, purpose, count: tf.zeros([count], tf.float64))
    monkeypatch.setattr(noise, "noisy_mean", mean)
    monkeypatch.setattr(
        noise, "noisy_means", lambda totals, *given: [mean(total, *given) for total in totals]
    )


@pytest.fixture(autouse=True)
def _draws_without_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests prepare batches under one key again and again, which a process never does."""
    monkeypatch.setattr(ledger, "_OWNERS", [])


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets the steps that this process has counted, as a new process would."""

    def forget() -> None:
        monkeypatch.setattr(ledger, "_SPENT", {})
        monkeypatch.setattr(ledger, "_LAST", {})
        monkeypatch.setattr(ledger, "_OWNERS", [])

    return forget


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="K/N: every N-th test from the K-th on; memory grows by test")
    parser.addoption("--reached", type=float, help="MINUTES: of tier 2, what a change reaches")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests into tiers, of `cases(n)` all but n into the last; keeps what was asked for."""
    for item in _beyond_their_cases(items):
        item.add_marker(pytest.mark.slow)
    tiers.choose(config, items)
    wanted = config.getoption("--part")
    if wanted:
        number, parts = map(int, wanted.split("/"))
        kept = items[number - 1 :: parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _beyond_their_cases(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of each test marked `cases(n)`, those that are not among its n, picked by a hash of names."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cases"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in by_test.values():
        (count,) = same[0].get_closest_marker("cases").args  # type: ignore[union-attr]
        same.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        yield from same[count:]
