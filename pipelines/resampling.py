"""Differences between runs, with errors over rows that judge and over seeds.

Runs that are judged by the same rows are judged by the same draws of them, so that the error of a
difference leaves out what the rows do to both.
"""

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from pipelines.points import Run
from pipelines.scores import weighted_auc

RESAMPLES = 100


def draws(rows: int) -> Iterator[np.ndarray]:
    """How often each row occurs among as many that are drawn with repetition, int `[rows]`.

    The `RESAMPLES` draws depend on the number of rows alone.
    """
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield np.bincount(rng.integers(0, rows, rows), minlength=rows)


def resampled_auc(labels: np.ndarray, scores: np.ndarray) -> list[float]:
    """The AUC of each draw."""
    ranks = np.unique(scores, return_inverse=True)[1]
    return [round(weighted_auc(labels, ranks, times), 5) for times in draws(len(labels))]


def resampled_accuracy(right: np.ndarray) -> list[float]:
    """The accuracy of each draw, given which rows were classified correctly, bool `[rows]`."""
    return [round(float(times @ right) / len(right), 5) for times in draws(len(right))]


def difference(
    runs: Sequence[Run], values: Sequence[float], base: Sequence[Run], base_values: Sequence[float]
) -> tuple[float, float]:
    """How far runs are ahead of a base, mean over the seeds that both have, and its error.

    The error's square is the variance over rows drawn anew, of the mean over seeds, and the
    variance between seeds ÷ seeds.

    Args:
        runs: Finished runs of one point, with their `seed` and `resampled` values.
        values: What is compared, one of each run, in the unit of `resampled`.
        base: The runs of another point.
        base_values: Likewise.
    """
    by_seed = {run["seed"]: (run, value) for run, value in zip(base, base_values, strict=True)}
    apart, drawn = [], []
    for run, value in zip(runs, values, strict=True):
        if run["seed"] in by_seed:
            theirs, their_value = by_seed[run["seed"]]
            apart.append(value - their_value)
            drawn.append(np.subtract(run["resampled"], theirs["resampled"]))
    over_rows = float(np.var(np.mean(drawn, axis=0), ddof=1))
    between = statistics.variance(apart) / len(apart) if len(apart) > 1 else 0.0
    return statistics.fmean(apart), math.sqrt(over_rows + between)
