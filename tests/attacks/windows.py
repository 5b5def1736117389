"""An attacker who sees which rows train in each step and how they move, and knows all but one row.

Each row of a table is a world of its own: example i looks up row i alone, and clipping and noise of
a row do not depend on other rows. Half of the worlds have their example, the others have not. So
one run gives thousands of samples of what the release of one example's world looks like, with it
and without it, and the likelihood ratio of each is known exactly.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from scipy import stats

from dp_sparse import DPAdaFESTOptimizer, PrivacyPlan

CONFIDENCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Observed:
    """What a run released.

    Attributes:
        rows: The rows that step t trains, bool `[steps, worlds]`.
        moved: The noisy sum of each of them, `[steps, worlds]`; 0 where there is none.
        joined: Which step's batches hold the example of a world that has one, bool
            `[steps, worlds]`.
        optimizer: What trained.
    """

    rows: np.ndarray
    moved: np.ndarray
    joined: np.ndarray
    optimizer: DPAdaFESTOptimizer


class _Watch(keras.callbacks.Callback):
    def __init__(self, table: keras.Variable) -> None:
        super().__init__()
        self.values = [table.numpy()[:, 0]]
        self._table = table

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        self.values.append(self._table.numpy()[:, 0])


def observe(plan: PrivacyPlan, worlds: int, joined: np.ndarray, **settings: Any) -> Observed:
    """Trains a table of `worlds` rows, the first half of which has an example each.

    Args:
        plan: Of `worlds // 2` examples.
        worlds: Rows.
        joined: Which steps' batches hold the example of each world, bool `[steps, worlds // 2]`.
        **settings: Of the optimizer.
    """
    examples = worlds // 2
    table = keras.layers.Embedding(worlds, 1, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((), dtype="int64"), table])
    optimizer = DPAdaFESTOptimizer(keras.optimizers.SGD(1.0), plan, 1.0, **settings)
    model.compile(optimizer, loss=lambda y_true, y_pred: 100.0 * y_pred)  # clipped to 1
    watch = _Watch(table.embeddings)
    batches = plan.sampling.batches((np.arange(examples), np.zeros(examples)))
    steps = len(joined)
    model.fit(batches, steps_per_epoch=1, epochs=steps, callbacks=[watch], verbose=0)
    moved = -np.diff(np.array(watch.values), axis=0) * plan.sampling.expected_batch_size
    there = np.concatenate([joined, np.zeros_like(joined)], axis=1)
    return Observed(moved != 0, moved, there, optimizer)


def log_likelihood_ratios(
    seen: Observed, lengths: list[int], scales: list[float], kept: float = 0.0
) -> np.ndarray:
    """log P[what a world shows, with its example] − log P[without], `[worlds]`.

    Args:
        seen: A run.
        lengths: Steps of each window.
        scales: Of each window, by how much its noise exceeds that of one map.
        kept: The part of the sum of a window that the next one begins with: 0, or 1 for a fault.
    """
    half = seen.joined.shape[1] // 2
    joined = np.tile(seen.joined[:, :half], 2)  # what would be, in worlds without an example, too
    optimizer = seen.optimizer
    deviation = optimizer.gradient_noise_multiplier
    clipped = 1 - 2.0**-20
    per_step = seen.rows * joined * clipped * (seen.moved - clipped / 2) / deviation**2
    total = per_step.sum(axis=0)
    begin, before = 0, np.zeros(2 * half)
    for length, scale in zip(lengths, scales, strict=True):
        end = begin + length
        if end >= len(seen.rows):
            break
        sums = kept * before + joined[begin:end].sum(axis=0)
        at, noise = scale * optimizer.threshold, scale * optimizer.contribution_noise_multiplier
        survived = seen.rows[end]
        with_it, without = (stats.norm.logsf, stats.norm.logcdf)
        total += np.where(
            survived,
            with_it((at - sums) / noise) - with_it(at / noise),
            without((at - sums) / noise) - without(at / noise),
        )
        begin, before = end, sums
    return total


def gaussian_distance(ratios: np.ndarray) -> float:
    """The least μ for which these samples could be of two unit Gaussians μ apart: a lower bound.

    Args:
        ratios: `[worlds]`, those with an example first. Half of them choose where to test.
    """
    present, absent = np.split(ratios, 2)
    thresholds = np.quantile(ratios[::2], np.linspace(0.02, 0.98, 25))

    def distance(of: slice, at: float, confidence: float) -> float:
        hits, alarms = np.sum(present[of] >= at), np.sum(absent[of] >= at)
        count = len(present[of])
        least = stats.beta.ppf(confidence, hits, count - hits + 1) if hits else 0.0
        most = stats.beta.isf(confidence, alarms + 1, count - alarms) if alarms < count else 1.0
        return float(stats.norm.isf(most) - stats.norm.isf(least))

    best = max(thresholds, key=lambda at: distance(slice(0, None, 2), at, CONFIDENCE))
    return distance(slice(1, None, 2), best, CONFIDENCE)
