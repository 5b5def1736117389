"""What a run's released values say of how it went, in words.

All of it follows from noisy gradients, the rows of each step and the weights: post-processing.
"""

import dataclasses
import math
from collections.abc import Sequence

import keras
import numpy as np
import scipy.stats

from dp_sparse.clipping import QuantileClipping
from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer
from dp_sparse.training.noise_walk import noise_walk

_DEVIATIONS = 3.0  # of a number of rows that noise alone explains
_CHANCE = 1e-4  # that noise alone has larger squares
_BEYOND = 1.5  # times the squared movement by noise alone, which is an estimate
_MOSTLY = 0.5  # of a variable's squares
_FEWEST_STEPS = 20  # of a run whose variables are judged
_FEW = 0.02  # of a run's examples
_SMALL = 64  # entries of variables whose noise is not judged by their size: biases
_OF_TABLES = (
    "Too few examples of a batch look up the same row of such a table for its votes to stand above "
    "the noise: larger batches, a smaller noise_ratio or a larger epsilon help; DPFESTOptimizer, "
    "and for small tables DPSGDOptimizer, need no votes."
)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What an optimizer has released, and its weights, at one time.

    Attributes:
        steps: Steps taken.
        rows: Rows noised, `[tables]`.
        energies: `[variables]`, as `StepDiagnostics` has them.
        unclipped: Released parts of unclipped examples, summed over steps.
        weights: Of the dense variables, by path.
    """

    steps: int
    rows: np.ndarray
    energies: np.ndarray
    unclipped: float
    weights: dict[str, np.ndarray]


def snapshot(optimizer: PrivateOptimizer) -> Snapshot:
    """Now; a copy of the dense variables is held in memory."""
    totals = optimizer.diagnostics
    return Snapshot(
        int(totals.steps.numpy()),
        totals.rows.numpy(),
        totals.energies.numpy(),
        float(totals.unclipped.numpy()),
        {v.path: keras.ops.convert_to_numpy(v) for v in optimizer.dense_variables},
    )


@dataclasses.dataclass(frozen=True)
class Signal:
    """How a variable's gradients stood to their noise, over a run.

    Attributes:
        path: Of the variable.
        entries: Entries that got noise in a step, on average.
        signal_to_noise: The root mean square of an entry of a step's clipped mean gradient over the
            deviation of its noise, estimated; 0 where the estimate is negative.
        moved: Whether gradients or movement stood above what noise explains.
        noise_share: The part of the weights' squares that noise alone explains, estimated; None
            where it is not known.
    """

    path: str
    entries: float
    signal_to_noise: float
    moved: bool
    noise_share: float | None


def signals(
    optimizer: PrivateOptimizer, begin: Snapshot, end: Snapshot, rate: float
) -> list[Signal]:
    """One of each variable whose noisy gradients were measured; none of a run of few steps.

    Args:
        optimizer: What trained.
        begin: Before the run.
        end: After it.
        rate: The learning rate of the dense variables, a root mean square over the run.
    """
    steps = end.steps - begin.steps
    energies = _since(end.energies, begin.energies)
    if steps < _FEWEST_STEPS or not energies.any():
        return []
    rows = dict(zip(map(id, optimizer.tables), _since(end.rows, begin.rows), strict=False))
    found = []
    for variable, energy in zip(optimizer.measured_variables, energies, strict=True):
        entries = float(math.prod(variable.shape)) * steps
        if optimizer.selects_rows and id(variable) in rows:
            entries = float(rows[id(variable)]) * variable.shape[1]
        if not entries:
            found.append(Signal(variable.path, 0.0, 0.0, False, None))
            continue
        excess = energy / entries - 1
        stands_out = bool(energy > scipy.stats.chi2.isf(_CHANCE, entries))
        walk = _walk(optimizer, rate, steps, energy / entries)
        moved, share = _movement(begin.weights, end.weights, variable.path, walk)
        ratio = math.sqrt(max(0.0, excess))
        found.append(Signal(variable.path, entries / steps, ratio, stands_out or moved, share))
    return found


def _walk(optimizer: PrivateOptimizer, rate: float, steps: int, energy: float) -> float | None:
    """The variance of what noise alone adds to a weight of a dense variable; None if not known.

    Args:
        optimizer: What trained.
        rate: Its learning rate.
        steps: Of the run.
        energy: The mean square of a noisy mean gradient's entry over the variance of its noise.
    """
    if isinstance(optimizer.clipping, QuantileClipping):  # the noise changed with the clip norm
        return None
    batch = optimizer.plan.sampling.expected_batch_size
    deviation = optimizer.clip_norm * optimizer.gradient_noise_multiplier / batch
    return noise_walk(optimizer.optimizer, rate, steps, deviation, energy * deviation**2)


def _movement(
    before: dict[str, np.ndarray], after: dict[str, np.ndarray], path: str, walk: float | None
) -> tuple[bool, float | None]:
    """Whether a variable moved beyond its noise; the part of its squares that noise explains."""
    if walk is None or path not in before or path not in after:
        return False, None
    size = before[path].size
    moved = float(np.sum((after[path] - before[path]) ** 2))
    most = _BEYOND * walk * scipy.stats.chi2.isf(_CHANCE, size)
    share = min(1.0, walk * size / max(float(np.sum(after[path] ** 2)), 1e-300))
    return bool(moved > most), share


def _since(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """What was added; a run may begin before there is anything to count."""
    return after - before if before.size == after.size else after


def findings_of(
    optimizer: PrivateOptimizer,
    begin: Snapshot,
    end: Snapshot,
    found: Sequence[Signal],
    unclipped: float | None,
) -> list[str]:
    """What a user should know of a run: tables, variables, learning rate, clip norm.

    Args:
        optimizer: What trained.
        begin: Before the run.
        end: After it.
        found: `signals` of the run.
        unclipped: The part of examples that no ε covers, where the user asked for it.
    """
    steps = end.steps - begin.steps
    hardly = _hardly_trained(optimizer, steps, _since(end.rows, begin.rows))
    lines, told = hardly + ([_OF_TABLES] if hardly else []), " ".join(hardly)
    still = [s.path for s in found if not s.moved and s.path not in told]
    if still:
        lines.append(
            f"Nothing but noise was seen in the gradients and the movement of {_listed(still)}: "
            "they hardly learned. A larger batch, more steps or a larger epsilon help."
        )
    drowned = [s.path for s in found if (s.noise_share or 0) > _MOSTLY and s.entries > _SMALL]
    if drowned:
        lines.append(
            f"Noise makes up most of the weights of {_listed(drowned)}: lower the learning rate, "
            "of which each step's noise takes its part."
        )
    released = isinstance(optimizer.clipping, QuantileClipping) and steps > 0
    part = (end.unclipped - begin.unclipped) / steps if released else unclipped
    return lines + ([] if part is None else _of_clip_norm(optimizer, part))


def _of_clip_norm(optimizer: PrivateOptimizer, unclipped: float) -> list[str]:
    norm = f"clip_norm={optimizer.clip_norm:g}"
    if unclipped > 1 - _FEW:
        return [
            f"{norm} clipped {1 - unclipped:.1%} of the examples: noise is as large as the clip "
            "norm, so a lower one has less noise for nearly the same gradients."
        ]
    if unclipped < _FEW:
        return [
            f"{norm} clipped {1 - unclipped:.1%} of the examples: of their gradients only the "
            "direction counts, so the clip norm and the learning rate of SGD act as one number."
        ]
    return []


def _hardly_trained(optimizer: PrivateOptimizer, steps: int, rows: np.ndarray) -> list[str]:
    """A line for each table of which no more rows were updated than noise alone explains.

    The rows of every step are released, and how many of them survive on noise alone is a public
    expectation. Only DP-AdaFEST has such rows.
    """
    if not isinstance(optimizer, DPAdaFESTOptimizer) or not steps:
        return []
    return [
        f"{table.path} hardly trained: {noised / steps:.3g} rows a step were updated, and "
        f"{false:.3g} would be by noise alone."
        for table, noised, false in zip(
            optimizer.noised_tables, rows, optimizer.false_rows_per_step, strict=True
        )
        if noised <= steps * false + _DEVIATIONS * math.sqrt(steps * false)
    ]


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5} more"
