"""What shapes, noise and settings let expect of a training run, before it begins."""

import math
from typing import Any

import keras
import numpy as np

from dp_sparse import clipping
from dp_sparse.accounting import Forecast, PrivacyPlan
from dp_sparse.clipping import QuantileClipping
from dp_sparse.optimizers import (
    DPAdaFESTOptimizer,
    DPSGDOptimizer,
    LazyDPSGDOptimizer,
    PrivateOptimizer,
)
from dp_sparse.training.noise_walk import noise_walk
from dp_sparse.training.table_shapes import lookups_of, tables_by_name

WIDE = 0.3  # of a weight's movement by noise: three times what `recommend` allows
_SCARCE = 0.2  # of all lookups: fewer than these train, and a user should know
_SMALL_BATCH = 1024
_DROWNED = 0.7  # of the signal of a run: below it most weights have less signal than noise
_POINTS = 100  # of a schedule of learning rates


def outlook(model: keras.Model, optimizer: PrivateOptimizer, batch: Any = None) -> list[str]:
    """What will go wrong in a run of a compiled model, as far as no data tells; a sentence each.

    Args:
        model: Without a problem that `check_model` finds, compiled with `optimizer`.
        optimizer: Any private optimizer. Of DP-FEST and exponential selection only the batches and
            the learning rate are judged.
        batch: As in `recommend`.
    """
    lines = of_batches(optimizer.plan)
    tables = clipping.embedding_tables(model)
    of_tables = sum(math.prod(table.shape) for table in tables)
    dense = sum(math.prod(v.shape) for v in model.trainable_variables) - of_tables
    if isinstance(optimizer, DPSGDOptimizer | LazyDPSGDOptimizer):
        sigma = optimizer.gradient_noise_multiplier
        lines += of_signal(signal_of_run(optimizer.plan, sigma, dense + of_tables))
    elif isinstance(optimizer, DPAdaFESTOptimizer):
        lines += _of_adafest(model, optimizer, tables, dense, batch)
    return lines + _of_learning_rate(model, optimizer, {id(table) for table in tables})


def of_signal(signal: float) -> list[str]:
    """Whether gradients that agree everywhere can be seen above the noise of a run."""
    if signal >= _DROWNED:
        return []
    return [
        "Gradients that spread over all weights will drown in the noise, even if they agree: only "
        "what sits in few weights can be learned. More examples, more steps, a larger batch or "
        "epsilon, or a smaller model help; dp_sparse.plan_table shows the first four."
    ]


def of_batches(plan: PrivacyPlan) -> list[str]:
    """Whether larger batches would buy more at the same ε."""
    size, examples = plan.sampling.expected_batch_size, plan.sampling.num_examples
    if size >= _SMALL_BATCH or 4 * size > examples:
        return []
    return [
        f"Batches of {size:g} are small: with fewer, larger ones the same epsilon buys more signal "
        "(dp_sparse.plan_table)."
    ]


def of_scarce(forecast: Forecast) -> list[str]:
    """Whether DP-AdaFEST will train many lookups of each table."""
    names = [name for name, own in forecast.tables.items() if own.trained_share < _SCARCE]
    if not names:
        return []
    return [
        f"Of {', '.join(names)} fewer than {_SCARCE:.0%} of the lookups will train. Larger batches "
        "help, or rows selected once by dp_sparse.select_top_k, for DPFESTOptimizer."
    ]


def signal_of_run(plan: PrivacyPlan, sigma: float | None, entries: float) -> float:
    """As `Recommendation.signal_of_run`, for `entries` that get noise in a step."""
    assert sigma is not None
    sampling = plan.sampling
    return math.sqrt(sampling.steps / max(1.0, entries)) * sampling.expected_batch_size / sigma


def noised_entries(forecast: Forecast, tables: list[keras.Variable]) -> float:
    """Entries of tables that DP-AdaFEST is expected to noise in a step."""
    rows = zip(tables, forecast.tables.values(), strict=True)
    return sum(table.shape[1] * own.noised for table, own in rows)


def _of_adafest(
    model: keras.Model,
    optimizer: DPAdaFESTOptimizer,
    tables: list[keras.Variable],
    dense: int,
    batch: Any,
) -> list[str]:
    try:
        lookups = lookups_of(model, batch)
    except ValueError:  # lists of any length: nothing is known of their number
        return []
    if not tables or optimizer.rows is not None:  # selected beforehand: which ones, is not known
        return []
    forecast = optimizer.plan.explain(
        tables_by_name(tables, lookups, {}),
        lookups=sum(lookups.values()),
        contribution_clip_norm=optimizer.contribution_clip_norm,
        noise_ratio=optimizer.noise_ratio,
        threshold=optimizer.threshold,
        expected_false_rows=optimizer.expected_false_rows if optimizer.threshold is None else None,
    )
    entries = dense + noised_entries(forecast, tables)
    signal = signal_of_run(optimizer.plan, forecast.gradient_noise_multiplier, entries)
    return [*of_signal(signal), *of_scarce(forecast)]


def _of_learning_rate(
    model: keras.Model, optimizer: PrivateOptimizer, tables: set[int]
) -> list[str]:
    """Whether noise alone would carry kernels far beyond where they begin."""
    plan = optimizer.plan
    if isinstance(optimizer.clipping, QuantileClipping):  # the noise will change with the clip norm
        return []
    deviation = optimizer.clip_norm * optimizer.gradient_noise_multiplier
    deviation /= plan.sampling.expected_batch_size
    steps = plan.sampling.steps
    walk = noise_walk(optimizer.optimizer, _rate(optimizer, steps), steps, deviation, deviation**2)
    if walk is None or walk < WIDE**2:
        return []
    kernels = [v for v in model.trainable_variables if id(v) not in tables and len(v.shape) > 1]
    squares = [np.mean(np.square(keras.ops.convert_to_numpy(v))) for v in kernels]
    if not kernels or walk < np.median(squares):
        return []
    return [
        f"At this learning rate noise alone moves each dense weight by some {math.sqrt(walk):.2g} "
        f"in {steps} steps, and kernels begin at {math.sqrt(np.median(squares)):.2g}: lower it."
    ]


def _rate(optimizer: PrivateOptimizer, steps: int) -> float:
    """The learning rate of dense variables, a root mean square over the run."""
    given = optimizer.optimizer._learning_rate
    if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
        numbers = np.unique(np.linspace(0, steps - 1, _POINTS, dtype=int))
        rates = [float(keras.ops.convert_to_numpy(given(int(number)))) for number in numbers]
        return float(np.sqrt(np.mean(np.square(rates))))
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
