"""What a run's released values say of how it went, in words.

Signals follow from noisy gradients, the rows of each step and the weights: post-processing. So do
the sentences, but for one of the clip norm that is made only of a count which the user asked for,
and says that no ε covers it.

`RunTotals` are an optimizer's running totals at one time; two of them tell of the steps between.
Noised rows are released. The other counts are covered by no ε, and have functions of their own, so
that nobody writes them by accident. `EpsilonPoints` has ε step by step for a few evaluations of the
accountant. `InputWait` measures how long steps wait for batches: that depends on the data, too.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import scipy.stats
import tensorflow as tf

from dp_sparse.accounting import FALSE_ROWS, PrivacyPlan, default_threshold
from dp_sparse.clipping import AutomaticClipping, QuantileClipping
from dp_sparse.core import replicas
from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer
from dp_sparse.reports.preflight_warnings import BIASED, WIDE, listed, noise_drift
from dp_sparse.sampling import own_map

_DEVIATIONS = 3.0  # of a number of rows that noise alone explains
_CHANCE = 1e-4  # that noise alone has larger squares
_BEYOND = 1.5  # times the squared movement by noise alone, which is an estimate
_MOSTLY = 0.5  # of a variable's squares
_FEWEST_STEPS = 20  # of a run that is judged
_FEW = 0.02  # of a run's examples
_MOST = 0.6  # of a run's examples: clipped, they decide where training goes
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
        iterations: Steps of the wrapped optimizer, also of earlier runs.
        rows: Rows noised, `[tables]`.
        energies: `[variables]`, as `StepDiagnostics` has them.
        unclipped: Released fractions of unclipped examples, summed over steps.
        weights: Of the variables that get noise on every entry, by path.
    """

    steps: int
    iterations: int
    rows: np.ndarray
    energies: np.ndarray
    unclipped: float
    weights: dict[str, np.ndarray]


def snapshot(optimizer: PrivateOptimizer) -> Snapshot:
    """Now; a copy of the variables that get noise on every entry is held in memory."""
    totals = optimizer.diagnostics
    dense = optimizer.dense_variables if optimizer.selects_rows else optimizer.measured_variables
    return Snapshot(
        int(totals.steps.numpy()),
        int(keras.ops.convert_to_numpy(optimizer.iterations)),
        totals.rows.numpy(),
        totals.energies.numpy(),
        float(totals.unclipped.numpy()),
        {v.path: keras.ops.convert_to_numpy(v) for v in dense if optimizer.stays_in_place(v)},
    )


@dataclasses.dataclass(frozen=True)
class Signal:
    """How a variable's gradients stood to their noise, over a run.

    Attributes:
        path: Of the variable.
        entries: Entries that got noise in a step, on average.
        signal_of_step: The root mean square of an entry of a step's clipped mean gradient over the
            deviation of its noise, estimated; 0 where the estimate is negative.
        stands_out: Whether gradients or movement stood above what noise explains.
        walk: The standard deviation of what noise alone moved a weight by, estimated; None where it
            is not known.
        noise_share: The part of the weights' squares that this walk explains; None as `walk`.
    """

    path: str
    entries: float
    signal_of_step: float
    stands_out: bool
    walk: float | None = None
    noise_share: float | None = None


def signals(
    optimizer: PrivateOptimizer, begin: Snapshot, end: Snapshot, rate: float
) -> list[Signal]:
    """One of each variable that got noise and was measured; none of a run of few steps.

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
            continue
        ratio = energy / entries
        one = Signal(
            variable.path,
            entries / steps,
            math.sqrt(max(0.0, ratio - 1)),
            bool(energy > scipy.stats.chi2.isf(_CHANCE, entries)),
        )
        known = variable.regularizer is None and variable.path in begin.weights
        walk = _walk(optimizer, begin, steps, rate, ratio) if known else None
        found.append(one if walk is None else _with_movement(one, begin, end, walk))
    return found


def _walk(
    optimizer: PrivateOptimizer, begin: Snapshot, steps: int, rate: float, energy: float
) -> float | None:
    """The variance of what noise alone adds to a weight of a dense variable; None if not known.

    Args:
        optimizer: What trained.
        begin: Before the run.
        steps: Of the run.
        rate: Its learning rate.
        energy: The mean square of a noisy mean gradient's entry over the variance of its noise.
    """
    if isinstance(optimizer.clipping, QuantileClipping):  # the noise changed with the clip norm
        return None
    batch = optimizer.plan.sampling.expected_batch_size
    deviation = optimizer.clip_norm * optimizer.gradient_noise_multiplier / batch
    square = energy * deviation**2
    return noise_drift(optimizer.optimizer, rate, steps, deviation, square, begin.iterations)


def _with_movement(one: Signal, begin: Snapshot, end: Snapshot, walk: float) -> Signal:
    """With what the movement of a variable tells, given the variance of noise's own."""
    before, after = begin.weights[one.path], end.weights[one.path]
    most = _BEYOND * walk * scipy.stats.chi2.isf(_CHANCE, before.size)
    moved = bool(np.sum((after - before) ** 2) > most)
    share = min(1.0, walk * before.size / max(float(np.sum(after**2)), 1e-300))
    stands_out = one.stands_out or moved
    return dataclasses.replace(one, stands_out=stands_out, walk=math.sqrt(walk), noise_share=share)


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
        unclipped: The fraction of unclipped examples, which no ε covers, where the user asked for
            it.
    """
    steps = end.steps - begin.steps
    hardly = _hardly_trained(optimizer, steps, _since(end.rows, begin.rows))
    lines = [*hardly.values(), *([_OF_TABLES] if hardly else [])]
    still = [s.path for s in found if not s.stands_out and s.path not in hardly]
    if still:
        lines.append(
            f"Nothing but noise was seen in {listed(still)}: there was little to learn, or the "
            "noise hid it. A larger batch, more steps or a larger epsilon tell which."
        )
    dense = {v.path for v in optimizer.measured_variables if len(v.shape) > 1}
    drowned = [s for s in found if s.path in dense and _drowned(s)]
    if drowned:
        lines.append(
            f"Noise moved each weight of {listed([s.path for s in drowned])} by some "
            f"{max(s.walk or 0.0 for s in drowned):.2g}, and makes up most of them: lower the "
            "learning rate."
        )
    return lines + _of_clip_norm(optimizer, begin, end, unclipped)


def _drowned(one: Signal) -> bool:
    return (one.walk or 0.0) > WIDE and (one.noise_share or 0.0) > _MOSTLY


def _of_clip_norm(
    optimizer: PrivateOptimizer, begin: Snapshot, end: Snapshot, unclipped: float | None
) -> list[str]:
    """Whether the clip norm clips nearly nothing or most, where that makes a difference."""
    steps = end.steps - begin.steps
    allowed, source = 0.0, " (no epsilon covers this count)"
    if isinstance(optimizer.clipping, QuantileClipping):
        unclipped = (end.unclipped - begin.unclipped) / max(1, steps)
        allowed, source = 2 * _deviation_of_count(optimizer) / math.sqrt(max(1, steps)), ""
    automatic = isinstance(optimizer.clipping, AutomaticClipping)
    if unclipped is None or steps < _FEWEST_STEPS or automatic:
        return []
    if unclipped - allowed > 1 - _FEW:
        return [
            f"The clip norm clipped fewer than {_FEW:.0%} of the examples{source}: noise is as "
            "large as the clip norm, so a lower one has less noise for nearly the same gradients."
        ]
    if unclipped + allowed < 1 - _MOST:
        return [
            f"The clip norm clipped {1 - unclipped:.0%} of the examples{source}: {BIASED}. Raise "
            "clip_norm if they are used, and compare the held-out log loss with a constant's."
        ]
    return []


def _deviation_of_count(optimizer: PrivateOptimizer) -> float:
    """The deviation of a released fraction: the count's noise and the size of Poisson batches."""
    assert optimizer.plan.noise_multiplier is not None
    of_count = optimizer.clipping.noise_multipliers(optimizer.plan.noise_multiplier)[1]
    batch = optimizer.plan.sampling.expected_batch_size
    return math.hypot(0.5 * of_count / batch, 0.5 / math.sqrt(batch))


def _hardly_trained(optimizer: PrivateOptimizer, steps: int, rows: np.ndarray) -> dict[str, str]:
    """By path, a line for each table of which no more rows were updated than noise explains.

    The rows of every step are released, and how many of them survive on noise alone is a public
    expectation. Only DP-AdaFEST has such rows. The false rows of a window are those of all of its
    steps.
    """
    if not isinstance(optimizer, DPAdaFESTOptimizer) or not steps:
        return {}
    windows = optimizer.windows
    ended = 0 if windows is None else len(windows)
    found = {}
    for table, noised, false in zip(
        optimizer.noised_tables, rows, optimizer.false_rows_per_step, strict=True
    ):
        if ended >= _MANY_WINDOWS and not noised:
            found[table.path] = _none_survived(optimizer, table, ended)
        elif noised <= steps * false + _DEVIATIONS * math.sqrt(optimizer.window * steps * false):
            found[table.path] = (
                f"{table.path} hardly trained: {noised / steps:.3g} rows a step were updated, and "
                f"{false:.3g} would be by noise alone."
            )
    return found


def _none_survived(optimizer: DPAdaFESTOptimizer, table: Any, windows: int) -> str:
    """That no row of a table survived any window, and a threshold that lets some."""
    rows = int(table.shape[0])
    deviation = optimizer.contribution_noise_multiplier * optimizer.contribution_clip_norm
    wanted = min(FALSE_ROWS, rows / 2)
    threshold = default_threshold(wanted, rows, deviation)
    return (
        f"{table.path}: no row survived any of {windows} windows. At threshold={threshold:.3g}, "
        f"{wanted:g} of its rows would survive on noise alone, and rows that are looked up would "
        "survive more often."
    )


_MANY_WINDOWS = 8  # of which none had a row that survived
_PART = 10  # of its steps, by which one point may lie behind another


@dataclasses.dataclass(frozen=True)
class RunTotals:
    """`StepDiagnostics` at one time.

    Attributes:
        steps: Steps taken by this process.
        rows: Rows noised, `[tables]`; empty before the first step.
        examples: Real examples of all batches; not private.
        clipped: How many of them were clipped; not private.
        not_finite: How many of them did not train; not private.
    """

    steps: int
    rows: np.ndarray
    examples: int
    clipped: int
    not_finite: int


def totals(optimizer: PrivateOptimizer) -> RunTotals:
    """Those of now; it waits for the step to end."""
    counts = optimizer.diagnostics
    return RunTotals(
        int(counts.steps.numpy()),
        counts.rows.numpy(),
        int(counts.examples.numpy()),
        int(counts.clipped.numpy()),
        int(counts.not_finite.numpy()),
    )


def rows_per_step(before: RunTotals, after: RunTotals) -> list[float]:
    """Rows noised a step in each table, on average."""
    start = before.rows if before.rows.size else np.zeros_like(after.rows)
    return ((after.rows - start) / _steps_between(before, after)).tolist()


def counts_without_noise(before: RunTotals, after: RunTotals) -> dict[str, float]:
    """What no ε covers: mean size of batches, part that was clipped, how many did not train."""
    examples = after.examples - before.examples
    return {
        "mean_batch_size": examples / _steps_between(before, after),
        "clip_fraction": (after.clipped - before.clipped) / max(1, examples),
        "quarantined_examples": float(after.not_finite - before.not_finite),
    }


def _steps_between(before: RunTotals, after: RunTotals) -> int:
    return max(1, after.steps - before.steps)


class EpsilonPoints:
    """ε at points of which the next one has at most a tenth more steps, or `every` more.

    An evaluation takes some 0.3 s. A run of S · `every` steps has about 10·ln S points; which ones
    depends on nothing else, so a run that goes on has the same.

    Args:
        plan: The plan of the run.
        every: Steps between two questions.
    """

    def __init__(self, plan: PrivacyPlan, every: int) -> None:
        self._plan, self._every = plan, every
        self._point, self._epsilon = 0, 0.0

    def at_least(self, step: int) -> float | None:
        """ε of the first point from `step` on, that of all steps last; None if the plan has none.

        Args:
            step: At least 1, and never less than before.
        """
        if step > self._point:
            while self._point < step:
                self._point += max(self._every, self._point // _PART // self._every * self._every)
            self._point = min(self._point, self._plan.sampling.steps)
            self._epsilon = self._plan.spent(self._point).epsilon
        return _finite_or_none(self._epsilon)

    @functools.cached_property
    def of_all_steps(self) -> float | None:
        """ε of all steps of the plan; None if it has none."""
        return _finite_or_none(self._plan.spent(self._plan.sampling.steps).epsilon)


def _finite_or_none(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


class InputWait:
    """A clock on datasets, which adds up how long each of their elements was waited for.

    Attributes:
        used: Whether a dataset has it.
    """

    def __init__(self) -> None:
        self.used = False
        replicas.undistributed(self._create)

    def _create(self) -> None:
        self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def restart(self) -> None:
        """Begins anew with 0 seconds."""
        self._seconds.assign(0.0)

    def seconds(self) -> float:
        """Since the last start."""
        return float(self._seconds.numpy())

    def timed(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """The same dataset; when asked for a batch, it reads the clock, asks, and reads again."""
        self.used = True
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would ask by itself, early
        asked = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: tf.timestamp())

        def arrived(asked: tf.Tensor, batch: Any) -> Any:
            self._seconds.assign_add(tf.maximum(tf.timestamp() - asked, 0))  # if it was set back
            return batch

        timed = own_map(tf.data.Dataset.zip(asked, batches).map(arrived))
        return timed.with_options(options)
