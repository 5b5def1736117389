"""What shapes, noise and settings let expect of a training run, before it begins."""

import math
from collections.abc import Sequence
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
from dp_sparse.training.table_shapes import inputs_of, lookups_of, tables_by_name

BIASED = (
    "of their gradients only the direction counts, so training no longer minimises the loss, and "
    "predicted probabilities may be far from the true rate even where AUC rises"
)
WIDE = 0.3  # of a weight's movement by noise: more than `recommend` allows
_SCARCE = 0.2  # of all lookups: fewer than these train, and a user should know
_SMALL_BATCH = 1024
_DROWNED = 0.7  # of the signal of a run: below it most weights have less signal than noise
_RARE = 5.0  # of the signal of a row: gradients never agree as well as it assumes
_SHOWN = 5  # names in a sentence
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
    found = _tables_of(model, tables, batch)
    sigma = optimizer.gradient_noise_multiplier
    if isinstance(optimizer, DPSGDOptimizer | LazyDPSGDOptimizer):
        lines += of_signal(signal_of_run(optimizer.plan, sigma, dense + of_tables))
        lines += of_rare_rows(optimizer.plan, sigma, tables, found)
    elif isinstance(optimizer, DPAdaFESTOptimizer) and optimizer.rows is None and found:
        lines += _of_adafest(optimizer, tables, dense, found)
        lines += of_rare_rows(optimizer.plan, sigma, tables, found)
    return lines + _of_learning_rate(model, optimizer, {id(table) for table in tables})


def listed(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


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
        f"Of {listed(names)} fewer than {_SCARCE:.0%} of the lookups will train. Larger batches "
        "help, or rows selected once by dp_sparse.select_top_k, for DPFESTOptimizer."
    ]


def of_rare_rows(
    plan: PrivacyPlan,
    sigma: float | None,
    tables: list[keras.Variable],
    found: dict[str, tuple[int, int] | np.ndarray],
) -> list[str]:
    """Whether the gradients of an average row, all of a run together, stand above its noise.

    Their sum, over the noise of a row of d entries: √T·B·(lookups of an example)/rows / (σ√d), if
    all agreed.

    Args:
        plan: The plan.
        sigma: Of the noise of gradients.
        tables: The tables.
        found: As `tables_by_name` has them, in the same order; empty if nothing is known.
    """
    assert sigma is not None
    per_row = math.sqrt(plan.sampling.steps) * plan.sampling.expected_batch_size / sigma
    signals = {}
    for table, (name, shape) in zip(tables, found.items(), strict=False):
        lookups = shape[1] if isinstance(shape, tuple) else float(np.sum(shape))
        signals[name] = per_row * lookups / table.shape[0] / math.sqrt(table.shape[1])
    rare = {name: signal for name, signal in signals.items() if signal < _RARE}
    if not rare:
        return []
    return [
        f"All gradients of a run for an average row of {listed(list(rare))} are less than "
        f"{_RARE:g} times its noise ({min(rare.values()):.2g} at worst), even if they agree: only "
        "rows that more examples look up will learn. Fewer rows (hashed or grouped ids), narrower "
        "tables, more examples or a larger epsilon help."
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


def _tables_of(
    model: keras.Model, tables: list[keras.Variable], batch: Any
) -> dict[str, tuple[int, int] | np.ndarray]:
    """As `tables_by_name`; empty where the number of lookups is not known."""
    try:
        return tables_by_name(tables, lookups_of(model, inputs_of(model, batch)), {})
    except ValueError:  # lists of any length
        return {}


def _of_adafest(
    optimizer: DPAdaFESTOptimizer,
    tables: list[keras.Variable],
    dense: int,
    found: dict[str, Any],
) -> list[str]:
    """What the forecast says, by Zipf's law."""
    most = sum(rows for rows, _ in found.values()) / 2  # as the optimizer has it
    forecast = optimizer.plan.explain(
        found,
        lookups=sum(lookups for _, lookups in found.values()),
        contribution_clip_norm=optimizer.contribution_clip_norm,
        noise_ratio=optimizer.noise_ratio,
        threshold=optimizer.threshold,
        expected_false_rows=(
            min(optimizer.expected_false_rows, most) if optimizer.threshold is None else None
        ),
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
    squares = [square for square in squares if square > 0]  # others begin at 0
    if not squares or walk < np.median(squares):
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
