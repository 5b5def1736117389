"""Which optimizer, with which settings, for a model and a plan; and what to expect of it.

It reads the model's shapes and the plan, and no data: what it says costs no privacy. The rules
follow from the study in `docs/results/defaults.md`, which has what they reach.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras

from dp_sparse import clipping
from dp_sparse.accounting import (
    FALSE_ROWS,
    LEAST_WINDOWS,
    NOISE_RATIO,
    Forecast,
    GaussianMechanism,
    PrivacyPlan,
    longest_window,
)
from dp_sparse.clipping import ClippingStyle, FlatClipping, QuantileClipping
from dp_sparse.core import validate
from dp_sparse.optimizers import DPAdaFESTOptimizer, DPSGDOptimizer, PrivateOptimizer
from dp_sparse.reports.preflight_warnings import (
    noised_entries,
    of_batches,
    of_rare_rows,
    of_scarce,
    of_signal,
    of_unused,
    signal_per_weight,
)
from dp_sparse.step import inputs_of, lookups_of, tables_by_name, values_of_outputs

MOST_DENSE_ENTRIES = 2e7  # of tables that DP-SGD gives noise to, in some tenths of a second a step
CLIP_NORM = 0.3
RATE = 0.01  # of Adam, in runs of few steps
WIDE = 16  # of a table for which LoRA is named
# For models whose weights are nearly all in tables (docs/results/windowed_selection.md):
WINDOW, FALSE_ROWS_OF_WINDOWS, NOISE_RATIO_OF_WINDOWS = 64, 100.0, 1.0
MOST_DENSE_SHARE = 0.01  # of all weights
WALK = 0.2  # of a weight under Adam in a run, if all gradients were noise: a standard deviation
# For a model of one output of one value, which is likely to be used as a probability or an amount:
CLIP_NORM_OF_ONE_VALUE = 1.0  # where it begins
CLIP_QUANTILE = 0.95  # of the gradients' norms: more clipping bends probabilities, less adds noise
_CLIPPING = QuantileClipping(CLIP_QUANTILE)
_OF_ADAM = (
    f"Adam at {RATE:g}, or at {WALK:g}/sqrt(steps) if that is less: over the whole run, noise "
    f"alone then moves a weight by about {WALK:g} at most."
)
_OF_CLIP_NORM = (
    f"clip_norm={CLIP_NORM:g} is meant to clip most gradients; Adam makes up for their size. It "
    "suits rankings and accuracy. Where the outputs are used as probabilities, compare with "
    f"clipping=dp_sparse.QuantileClipping({CLIP_QUANTILE:g})."
)
_OF_ONE_VALUE = (
    "The model has one output value, such as a probability. Its learning rate falls to 0 over the "
    "steps of the plan: late steps of noise make probabilities too extreme."
)
_OF_QUANTILE = (
    f"The clip norm follows the norm that {CLIP_QUANTILE:.0%} of the gradients stay below, by a "
    "noisy count that the plan pays for. Where most are clipped, training no longer minimises the "
    "loss, and predicted probabilities drift from the true rate. Where only the order of examples "
    f"counts, clip_norm={CLIP_NORM:g} at a constant rate may reach a higher AUC, most likely at a "
    "small epsilon: compare the two."
)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What `recommend` says; `print` shows it, with its reasons.

    Attributes:
        plan: The plan that it was made for.
        method: `DPSGDOptimizer` or `DPAdaFESTOptimizer`.
        arguments: Of the private optimizer, beside the wrapped one and the plan.
        wrapped: The name of the Keras optimizer to wrap.
        wrapped_arguments: Its own.
        signal_per_weight: √(T/P)·B/σ2 for P weights that get noise in a step: the signal to noise
            of the run's gradients, as `PlanRow` has it, shared by so many weights. Where clipped
            gradients agree in all examples and steps, a weight's signal over the deviation of its
            noise is this, as a root mean square. No run of DP-SGD has more, and none of DP-AdaFEST
            that noises as many rows as its forecast.
        forecast: What DP-AdaFEST will do with each table; None for DP-SGD, of which all rows train.
        reasons: Sentences.
        warnings: What to know before training; empty if there is nothing.

    Examples:
        >>> import dp_sparse, keras
        >>> sampling = dp_sparse.PoissonSampling(10, expected_batch_size=5, steps=10)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.1, 0.01), sampling).calibrate()
        >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(1)])
        >>> advice = dp_sparse.recommend(model, plan)
        >>> advice.method.__name__, advice.signal_per_weight < 0.7
        ('DPSGDOptimizer', True)
        >>> advice.warnings[0]
        'Gradients that spread over all weights will drown in the noise, even if they agree: ...'
    """

    plan: PrivacyPlan
    method: type[PrivateOptimizer]
    arguments: dict[str, Any]
    wrapped: str
    wrapped_arguments: dict[str, Any]
    signal_per_weight: float
    forecast: Forecast | None
    reasons: list[str]
    warnings: list[str]

    def optimizer(self) -> PrivateOptimizer:
        """The private optimizer; a new one at each call, but one plan pays for one run."""
        wrapped = getattr(keras.optimizers, self.wrapped)(**self.wrapped_arguments)
        return self.method(wrapped, self.plan, **self.arguments)

    def __str__(self) -> str:
        wrapped = f"keras.optimizers.{self.wrapped}({_arguments(self.wrapped_arguments)})"
        own = _arguments(self.arguments)
        return "\n".join(
            [
                f"dp_sparse.{self.method.__name__}({wrapped}, plan, {own})",
                *(f"- {reason}" for reason in self.reasons),
                *(f"! {warning}" for warning in self.warnings),
                *([str(self.forecast)] if self.forecast is not None else []),
            ]
        )


def recommend(
    model: keras.Model,
    plan: PrivacyPlan,
    batch: Any = None,
    frequencies: Mapping[str, Any] | None = None,
) -> Recommendation:
    """The optimizer and settings to begin with, from public facts: shapes, batch size and noise.

    DP-SGD while a step can give noise to every row of every table; beyond that DP-AdaFEST.

    Args:
        model: Any Keras model that `check_model` finds no problem with.
        plan: A calibrated plan of `GaussianMechanism`.
        batch: A batch of inputs x, or `(x, y)`, of which only shapes are read; needed for a model
            that is not functional, or whose inputs have axes of unknown length.
        frequencies: For tables, by the names of their layers, the public probabilities that an
            example looks each row up, `[rows]`; by default Zipf's law.

    Raises:
        ValueError: No model, a model of unknown inputs and no `batch`, a plan without noise or of
            another mechanism, or frequencies of a table that the model does not have.
        UnsupportedLayerError: The model cannot be trained privately; `check_model` says why.

    Examples:
        >>> import dp_sparse, keras
        >>> sampling = dp_sparse.PoissonSampling(100_000, expected_batch_size=4096, epochs=10)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-5), sampling).calibrate()
        >>> inputs = keras.Input((), dtype="int32")
        >>> rows = keras.layers.Embedding(10_000, 16, name="users")(inputs)
        >>> model = keras.Model(inputs, keras.layers.Dense(1)(rows))
        >>> advice = dp_sparse.recommend(model, plan)
        >>> model.compile(advice.optimizer(), loss="mse")
        >>> print(advice)
        dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(learning_rate=...), plan, clip_norm=1, ...)
        - DP-SGD: ...

    ### Formal Guarantees
    Nothing but shapes, the plan and `frequencies` is read, which are public.
    """
    validate.of_keras_3("a model", model)
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected a keras.Model, got model={model!r}.")
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"Expected a PrivacyPlan, got plan={plan!r}.")
    if plan.noise_multiplier is None or not isinstance(plan.mechanism, GaussianMechanism):
        raise ValueError(
            "Expected a calibrated plan with mechanism=GaussianMechanism(), got "
            f"noise_multiplier={plan.noise_multiplier!r} and mechanism={plan.mechanism!r}: use "
            "PrivacyPlan(budget, sampling).calibrate()."
        )
    specs = inputs_of(model, batch)
    lookups = lookups_of(model, specs)
    tables = clipping.embedding_tables(model)
    found = tables_by_name(tables, lookups, frequencies or {})
    entries = sum(math.prod(table.shape) for table in tables)
    dense = sum(math.prod(v.shape) for v in model.trainable_variables) - entries
    own = _settings_of(plan, values_of_outputs(model, specs) == 1)
    if entries <= MOST_DENSE_ENTRIES:
        sigma, _ = own.style.noise_multipliers(plan.noise_multiplier)
        rare = [*of_unused(found), *of_rare_rows(plan, sigma, tables, found)]
        return _dp_sgd(plan, own, sigma, dense + entries, entries, rare)
    count = max(1, sum(lookups.values()))
    alone = dense <= MOST_DENSE_SHARE * entries and _reads_ids_alone(specs, count)
    return _dp_adafest(plan, own, dense, tables, found, count, alone)


def _reads_ids_alone(specs: Any, lookups: int) -> bool:
    """Whether all inputs are ids, as far as can be told, or integers beside them, such as masks.

    Keras' inputs are floats by default, ids too: these are looked up one by one.
    """
    specs = keras.tree.flatten(specs)
    if not any(each.dtype.is_floating for each in specs):
        return True
    shapes = [each.shape[1:] for each in specs]
    return sum(math.inf if None in shape else math.prod(shape) for shape in shapes) <= lookups


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What does not depend on the method.

    Attributes:
        rate: The learning rate of Adam, a number or a schedule.
        arguments: Of clipping.
        style: How gradients are clipped.
        reasons: Sentences.
    """

    rate: Any
    arguments: dict[str, Any]
    style: ClippingStyle
    reasons: list[str]


def _settings_of(plan: PrivacyPlan, one_value: bool) -> _Settings:
    steps = plan.sampling.steps
    rate = float(f"{min(RATE, WALK / math.sqrt(steps)):.2g}")
    if not one_value:
        clip_norm = {"clip_norm": CLIP_NORM}
        return _Settings(rate, clip_norm, FlatClipping(), [_OF_ADAM, _OF_CLIP_NORM])
    falling = keras.optimizers.schedules.PolynomialDecay(rate, steps, end_learning_rate=0.0)
    moving = {"clip_norm": CLIP_NORM_OF_ONE_VALUE, "clipping": _CLIPPING}
    return _Settings(falling, moving, _CLIPPING, [_OF_ADAM, _OF_ONE_VALUE, _OF_QUANTILE])


def _dp_sgd(
    plan: PrivacyPlan,
    own: _Settings,
    sigma: float,
    entries: int,
    of_tables: int,
    rare: list[str],
) -> Recommendation:
    signal = signal_per_weight(plan, sigma, entries)
    few = f"the tables have {of_tables:,} entries in all, few enough to give noise to each of them"
    reasons = [
        f"DP-SGD: {few}, so every lookup trains." if of_tables else "DP-SGD: there is no table.",
        *own.reasons,
    ]
    return Recommendation(
        plan=plan,
        method=DPSGDOptimizer,
        arguments=own.arguments,
        wrapped="Adam",
        wrapped_arguments={"learning_rate": own.rate},
        signal_per_weight=signal,
        forecast=None,
        reasons=[*reasons, _of_signal(signal, entries)],
        warnings=[*of_batches(plan), *of_signal(signal), *rare],
    )


def _dp_adafest(
    plan: PrivacyPlan,
    own: _Settings,
    dense: int,
    tables: list[keras.Variable],
    found: dict[str, Any],
    lookups: int,
    alone: bool,
) -> Recommendation:
    options: dict[str, Any] = {"noise_ratio": NOISE_RATIO, "expected_false_rows": FALSE_ROWS}
    window = _window_of(plan, own) if alone else 1
    if window > 1:
        most = sum(table.shape[0] for table in tables) / 2
        options = {
            "noise_ratio": NOISE_RATIO_OF_WINDOWS,
            "expected_false_rows": min(FALSE_ROWS_OF_WINDOWS, most),
            "window": window,
        }
    forecast = plan.explain(found, lookups=lookups, **options)
    entries = dense + noised_entries(forecast, tables)
    signal = signal_per_weight(plan, forecast.gradient_noise_multiplier, entries)
    of_tables = sum(math.prod(table.shape) for table in tables)
    rare = of_rare_rows(plan, forecast.gradient_noise_multiplier, tables, found)
    return Recommendation(
        plan=plan,
        method=DPAdaFESTOptimizer,
        arguments={**own.arguments, **options},
        wrapped="Adam",
        wrapped_arguments={"learning_rate": own.rate},
        signal_per_weight=signal,
        forecast=forecast,
        reasons=[
            f"DP-AdaFEST: the tables have {of_tables:,} entries in all, too many to give noise to "
            "each of them at every step.",
            _of_selection(window),
            *own.reasons,
            "Adam keeps two numbers for each entry of a table, and changes those of trained rows.",
            *_of_wide(tables),
            _of_signal(signal, entries),
        ],
        warnings=[
            *of_batches(plan),
            *of_unused(found),
            *of_signal(signal),
            *of_scarce(forecast),
            *rare,
        ],
    )


def _window_of(plan: PrivacyPlan, own: _Settings) -> int:
    """The longest that may help, and whose noise reaches."""
    assert plan.noise_multiplier is not None  # checked before
    sigma, _ = own.style.noise_multipliers(plan.noise_multiplier)
    window = max(1, min(WINDOW, plan.sampling.steps // LEAST_WINDOWS))
    return longest_window(plan.sampling, window, sigma, NOISE_RATIO_OF_WINDOWS, plan.budget.delta)


def _of_selection(window: int) -> str:
    """Why rows are chosen as they are."""
    if window == 1:
        return (
            f"noise_ratio={NOISE_RATIO:g}: most of the privacy is spent on gradients, and rows of "
            "many lookups still stand above the threshold."
        )
    return (
        f"window={window}, noise_ratio={NOISE_RATIO_OF_WINDOWS:g}: nearly all weights are in the "
        "tables, and the sum of several steps finds the rows that are worth training: the smaller "
        "ε, the more accuracy it gains (docs/results/windowed_selection.md)."
    )


def _of_wide(tables: list[keras.Variable]) -> list[str]:
    """What LoRA on wide tables saves beside the selection of rows."""
    width = max(table.shape[1] for table in tables)
    if width < WIDE:
        return []
    return [
        f"The widest table has rows of {width}: keras.layers.Embedding(..., lora_rank=1) adds "
        f"noise to one number a row instead of {width}; on a bag of words it cost about one point "
        "of accuracy (docs/results/bag.md)."
    ]


def _of_signal(per_weight: float, entries: float) -> str:
    return (
        f"Signal per weight {per_weight:.3g}: the signal to noise of all steps along one "
        f"direction, {per_weight * math.sqrt(entries):,.0f}, over the square root of the "
        f"{entries:,.0f} weights that share it."
    )


def _arguments(given: Mapping[str, Any]) -> str:
    """As code."""
    return ", ".join(f"{name}={_code(value)}" for name, value in given.items())


def _code(value: Any) -> str:
    if isinstance(value, QuantileClipping):
        return f"dp_sparse.QuantileClipping({value.target_quantile:g})"
    if isinstance(value, keras.optimizers.schedules.PolynomialDecay):
        begin, steps = value.initial_learning_rate, value.decay_steps
        return f"keras.optimizers.schedules.PolynomialDecay({begin:g}, {steps}, 0.0)"
    return f"{value:g}"
