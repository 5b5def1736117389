"""Mechanisms that are broken on purpose. Each is a context in which models train with the fault."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import scipy.stats
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.noise import streams
from dp_sparse.optimizers import adafest, dpsgd
from dp_sparse.selection import threshold

Fault = Callable[[], contextlib.AbstractContextManager[Any]]


def none() -> contextlib.AbstractContextManager[None]:
    """The mechanism as it is."""
    return contextlib.nullcontext()


def half_the_noise() -> contextlib.AbstractContextManager[Any]:
    """σ/2 on every dense parameter."""
    original = noise.noisy_means

    def halved(totals: Any, deviation: Any, *rest: Any) -> Any:
        return original(totals, deviation / 2, *rest)

    return mock.patch.object(noise, "noisy_means", halved)


def noise_on_touched_rows_only() -> contextlib.AbstractContextManager[Any]:
    """EANA: which rows were looked up is released as it is."""
    original = adafest.select_rows

    def touched(contributions: Any, threshold: float, deviation: float, draw: Any) -> Any:
        del threshold, deviation
        return original(contributions, 1e-3, 1e-9, draw)

    return mock.patch.object(adafest, "select_rows", touched)


def squared_map_noise() -> contextlib.AbstractContextManager[Any]:
    """σ1²·C1² for σ1·C1, as it is printed: too few rows survive on noise alone."""

    def printed(tau: float, deviation: float) -> float:
        return float(scipy.stats.norm.sf(tau / deviation**2))

    return mock.patch.object(threshold, "survival_probability", printed)


@contextlib.contextmanager
def realised_batch_size() -> Iterator[None]:
    """Sums over the batch that there was, not over the expected one."""
    original, sizes = dpsgd.noisy_dense, []

    def means(self: Any, sums: Any, draw: Any) -> Any:
        sizes.append(tf.cast(tf.maximum(sums.amounts.counts[0], 1), tf.float32))
        return kept(self, sums, draw)

    def by_realised(dense: Any, deviation: Any, batch_size: float, draw: Any) -> Any:
        factor = batch_size / sizes.pop()
        return [(v, mean * factor) for v, mean in original(dense, deviation, batch_size, draw)]

    kept = dpsgd.DPSGDOptimizer._noisy_means
    with (
        mock.patch.object(dpsgd, "noisy_dense", by_realised),
        mock.patch.object(dpsgd.DPSGDOptimizer, "_noisy_means", means),
    ):
        yield


def the_same_noise_after_a_resume() -> contextlib.AbstractContextManager[Any]:
    """A restored optimizer goes on with its key, and counts its draws from 0."""

    def replayed(self: streams.NoiseKey, steps: int) -> None:
        del steps
        self._draws.assign(0)

    return mock.patch.object(streams.NoiseKey, "refresh", replayed)
