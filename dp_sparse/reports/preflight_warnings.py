"""What shapes, noise and settings let expect of a training run, before it begins.

How far noise alone carries a weight, by the rule of the optimizer that applies it.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import scipy.special

from dp_sparse import clipping
from dp_sparse.accounting import Forecast, PrivacyPlan, frequencies_of, signal_to_noise
from dp_sparse.clipping import QuantileClipping
from dp_sparse.optimizers import (
    DPAdaFESTOptimizer,
    DPSGDOptimizer,
    LazyDPSGDOptimizer,
    PrivateOptimizer,
)
from dp_sparse.step import inputs_of, lookups_of, tables_by_name

_UNKNOWN = ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "amsgrad")
BIASED = (
    "of their gradients only the direction counts, so training no longer minimises the loss, and "
    "predicted probabilities may be far from the true rate even where AUC rises"
)
WIDE = 0.3  # of a weight's movement by noise: more than `recommend` allows
_SCARCE = 0.2  # of all lookups: fewer than these train, and a user should know
_SMALL_BATCH = 1024
_DROWNED = 0.7  # of the signal per weight: below it most weights have less signal than noise
_RARE = 10.0  # of the signal of a row: gradients never agree as well as it assumes
_MOST = 0.5  # of an example's lookups, that reach rows with such a signal
_SHOWN = 5  # names in a sentence
_POINTS = 100  # of a schedule of learning rates


def noise_drift(
    optimizer: keras.optimizers.Optimizer,
    rate: float,
    steps: int,
    deviation: float,
    mean_square: float,
    steps_before: int = 0,
) -> float | None:
    """The variance of what noise alone adds to one weight in a run.

    Adam and Adagrad divide by the root of a mean of squares, which noise and gradients share. Both
    are taken as the same in each step: an approximation, best for long runs.

    Args:
        optimizer: What applies the noisy mean gradients.
        rate: Its learning rate, a root mean square over the run.
        steps: Of the run.
        deviation: Of the noise in one step's mean gradient.
        mean_square: Of an entry of the noisy mean gradient.
        steps_before: Of the optimizer before the run, which Adagrad remembers.

    Returns:
        None for an optimizer other than Keras' SGD, Adagrad and Adam, or with an option that
        changes the rule.
    """
    if any(getattr(optimizer, name, None) for name in _UNKNOWN):
        return None
    if type(optimizer) is keras.optimizers.SGD:
        momentum = optimizer.momentum
        reached = (1 - momentum ** np.arange(1.0, steps + 1)) / (1 - momentum)
        return float((rate * deviation) ** 2 * np.sum(reached**2))
    if type(optimizer) is keras.optimizers.Adam:
        numbers = steps_before + np.arange(1.0, steps + 1)
        corrections = np.sqrt(1 - optimizer.beta_2**numbers)  # Keras leaves epsilon without it
        roots = np.sqrt(mean_square) + optimizer.epsilon / corrections
        return float(np.sum((rate * deviation / roots) ** 2))
    if type(optimizer) is keras.optimizers.Adagrad:
        first = (optimizer.initial_accumulator_value + optimizer.epsilon) / mean_square
        ends = first + steps_before + np.array([1, steps + 1])
        harmonic = np.diff(scipy.special.digamma(ends))[0]
        return float((rate * deviation) ** 2 / mean_square * harmonic)
    return None


def warnings_before(
    model: keras.Model, optimizer: PrivateOptimizer, batch: Any = None
) -> list[str]:
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
    lines += of_unused(found)
    sigma = optimizer.gradient_noise_multiplier
    if isinstance(optimizer, DPSGDOptimizer | LazyDPSGDOptimizer):
        lines += of_signal(signal_per_weight(optimizer.plan, sigma, dense + of_tables))
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
    tables = forecast.tables.items()
    names = [name for name, own in tables if own.looked_up and own.trained_share < _SCARCE]
    if not names:
        return []
    return [
        f"Of {listed(names)} fewer than {_SCARCE:.0%} of the lookups will train. Larger batches "
        "help, or rows selected once by dp_sparse.select_top_k, for DPFESTOptimizer."
    ]


def of_unused(found: dict[str, tuple[int, int] | np.ndarray]) -> list[str]:
    """Whether the model has tables that it never looks up; `found` as `tables_by_name` has it."""
    names = [name for name, shape in found.items() if isinstance(shape, tuple) and not shape[1]]
    if not names:
        return []
    return [
        f"The model looks up no row of {listed(names)}, which can learn nothing: leave out the "
        "layer, use it in call, or set its trainable=False."
    ]


def of_rare_rows(
    plan: PrivacyPlan,
    sigma: float | None,
    tables: list[keras.Variable],
    found: dict[str, tuple[int, int] | np.ndarray],
) -> list[str]:
    """Whether most lookups of an example reach rows whose gradients stand above their noise.

    Those of a row that an example looks up with probability f, over the noise of its d entries, all
    steps together: √T·B·f/(σ√d), if all agreed. Rows of the study of defaults that had less than 10
    hardly learned; where they have most of the lookups, the model did not.

    Args:
        plan: The plan.
        sigma: Of the noise of gradients.
        tables: The tables.
        found: As `tables_by_name` has them, in the same order; empty if nothing is known.
    """
    assert sigma is not None
    run, looked_up, seen = signal_to_noise(plan.sampling, sigma), 0.0, 0.0
    rare = []
    for table, (name, shape) in zip(tables, found.items(), strict=False):
        rows = frequencies_of(name, shape, 1.0)
        of_rows = rows.frequencies * rows.counts
        learns = run * rows.frequencies / math.sqrt(table.shape[1]) >= _RARE
        own, of_learning = float(of_rows.sum()), float(of_rows @ learns)
        looked_up, seen = looked_up + own, seen + of_learning
        if of_learning < _MOST * own:
            rare.append(name)
    if seen >= _MOST * looked_up:
        return []
    return [
        f"Only {seen / looked_up:.0%} of an example's lookups are of rows that enough others look "
        f"up to stand out of the noise; the rest, most of {listed(rare)}, will learn hardly "
        "anything. Fewer rows (hashed or grouped ids), narrower tables, more examples or a larger "
        "epsilon help."
    ]


def signal_per_weight(plan: PrivacyPlan, sigma: float | None, entries: float) -> float:
    """As `Recommendation.signal_per_weight`, for `entries` that get noise in a step."""
    assert sigma is not None
    return signal_to_noise(plan.sampling, sigma) / math.sqrt(max(1.0, entries))


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
        lookups=max(1, sum(lookups for _, lookups in found.values())),
        contribution_clip_norm=optimizer.contribution_clip_norm,
        noise_ratio=optimizer.noise_ratio,
        threshold=optimizer.threshold,
        window=optimizer.window,
        expected_false_rows=(
            min(optimizer.expected_false_rows, most) if optimizer.threshold is None else None
        ),
    )
    entries = dense + noised_entries(forecast, tables)
    signal = signal_per_weight(optimizer.plan, forecast.gradient_noise_multiplier, entries)
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
    walk = noise_drift(optimizer.optimizer, _rate(optimizer, steps), steps, deviation, deviation**2)
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
