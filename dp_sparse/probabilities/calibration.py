"""`calibrate_probabilities`: predictions that are probabilities again, at a small share of ε.

Clipping gives nearly every example a gradient of the same length, so a private model ranks well and
says too much or too little: its log loss may be worse than a constant's. A noisy histogram of
scores repairs that after training, and measures the run on its own data.
"""

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import PrivacyBudget, PrivacyPlan, release_noise, smallest_noise
from dp_sparse.core import PrivacyError, validate, whole_file
from dp_sparse.optimizers import private_optimizer_of
from dp_sparse.probabilities import measures
from dp_sparse.probabilities.head import with_head
from dp_sparse.probabilities.measures import Measure
from dp_sparse.probabilities.predictions import scored
from dp_sparse.probabilities.reliability import figure
from dp_sparse.probabilities.score_histogram import (
    ScoreHistogram,
    Tally,
    noise_paid_by,
    release_of,
)
from dp_sparse.probabilities.score_map import METHODS, ScoreMap, fitted
from dp_sparse.reports import report_page
from dp_sparse.sampling import chunks_of
from dp_sparse.step import has_folder

_TAKEN: set[str] = set()  # runs of this process whose histogram was drawn
_ONE_DRAWS = threading.Lock()
_RESERVE = "plan = dp_sparse.reserve_calibration(plan, share=0.01), before training"


def reserve_calibration(plan: PrivacyPlan, share: float = 0.01) -> PrivacyPlan:
    """The plan with room for one `calibrate_probabilities`, not calibrated yet.

    The histogram is composed with training in one privacy loss. At share=0.01 training's noise
    grows by less than 1 %. It takes some seconds.

    Args:
        plan: A plan without such room, calibrated or not.
        share: The part of ε for the histogram, in (0, 1).

    Raises:
        ValueError: The plan has room already, or no noise meets its budget.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=8000, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling)
        >>> plan = dp_sparse.reserve_calibration(plan, share=0.1)
        >>> print(plan.releases[0].name)
        score histogram of 34 bins, to calibrate probabilities (Gaussian noise of standard
        deviation ... on each count)
    """
    if noise_paid_by(plan.releases) is not None:
        raise ValueError("Expected a plan without a score histogram, got one that pays for it.")
    share = validate.probability("share", share)
    noise = release_noise(plan, dp_accounting.GaussianDpEvent, share)
    releases = (*plan.releases, release_of(noise))
    return dataclasses.replace(plan, releases=releases, noise_multiplier=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """A score map for a model's predictions, and what the histogram says of them.

    Call it with the trained model for a calibrated one, or give it to
    `export_model(..., as_model=calibration)`.

    Attributes:
        histogram: What was released; everything else follows from it.
        score_map: From scores to calibrated scores.
        measures: Numbers of the examples that were counted, by name, each with the standard error
            that noise gives it: "rate" of positives, "mean_prediction", "calibration_error" (the
            mean of |rate − prediction| over bins), "auc", "log_loss", "log_loss_of_a_constant", and
            with "calibrated_" in front those of calibrated predictions. Of several classes a
            positive is an example whose label is the class with the largest probability.
        statement: What the histogram cost apart from the model's plan; empty if the plan pays.
    """

    histogram: ScoreHistogram
    score_map: ScoreMap
    measures: Mapping[str, Measure]
    statement: str = ""
    inputs: Callable[[], Any] = dataclasses.field(repr=False, default=lambda: None)

    @property
    def paid_by(self) -> str | None:
        """The run of the plan that pays for the histogram; None if it has a budget of its own."""
        return self.histogram.paid_by

    def __call__(self, model: keras.Model) -> keras.Model:
        """A model with the calibrated output, of Keras' own layers; it shares the model's weights.

        Its layers behind the model do not train.
        """
        return with_head(model, self.score_map, self.histogram.kind, self.inputs())

    def __str__(self) -> str:
        rows = measures.as_table(self.measures)
        return "\n".join(
            f"{name}: {before}{after and f' -> {after}'}" for name, before, after in rows
        )

    def section(self) -> str:
        """Measures and the reliability diagram as HTML, for `PrivacyReport.add_section`."""
        headers = ["of the examples that were counted", "before", "calibrated"]
        rows = measures.as_table(self.measures)
        note = "Scores count as the middle of their bin; ± is the standard error of the noise."
        drawn = report_page.svg(figure(self.histogram, self.score_map))
        return report_page.table(headers, rows) + report_page.text(note) + drawn

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws rates over predictions, before and after.

        Args:
            path: A file whose suffix matplotlib knows, such as .png or .svg.

        Raises:
            ImportError: matplotlib is missing; the message names the extra that installs it.
        """
        with whole_file(path) as file:
            drawn = figure(self.histogram, self.score_map)
            drawn.savefig(file, format=Path(path).suffix[1:] or "png", dpi=120)


def calibrate_probabilities(
    model: keras.Model,
    examples: Any,
    *,
    method: str = "platt",
    budget: PrivacyBudget | None = None,
    label_range: tuple[float, float] | None = None,
    output: str | int | None = None,
    weight_cap: float = 1.0,
    num_examples: int | None = None,
) -> Calibration:
    """Draws the histogram that the plan has room for, and fits a map of predictions to it.

    It costs one prediction of each example. Call it once, after training; in a `Run`, call
    `run.calibrate_probabilities`, which keeps the histogram.

    Args:
        model: The trained model, compiled with a private optimizer.
        examples: Those that it trained on, each once: arrays `(x, y[, sample_weight])`, a data
            source, or a `tf.data.Dataset` of batches. Not the batches of a sampler.
        method: "platt" (an affine map of log odds; of a regression, of predictions) or "isotonic".
        budget: For examples that the model did not train on: what the histogram may cost on its
            own, beside the plan. By default the model's plan pays.
        label_range: Of a regression, the least and the largest label: public, not taken from data.
        output: The name or place of the output, of several.
        weight_cap: Larger sample weights count as this one. Public.
        num_examples: How many examples there are, if `examples` does not tell.

    Returns:
        The map, and measures of the examples.

    Raises:
        ValueError: An argument out of its range, predictions or labels of another kind, another
            number of examples, or a plan without room for it.
        BadExampleError: A label or a weight out of its range.
        PrivacyError: The plan's histogram was drawn, its run has a folder, a prediction depends on
            other examples, or `examples` are batches of a sampler.

    Warns:
        UserWarning: Too few examples stand out from the noise, so predictions stay as they are.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=4000, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling)
        >>> plan = dp_sparse.reserve_calibration(plan, share=0.1).calibrate()
        >>> x = np.random.default_rng(1).normal(size=(4000, 1))
        >>> y = (x[:, 0] > 0).astype(float)
        >>> out = keras.layers.Dense(1, activation="sigmoid")
        >>> model = keras.Sequential([keras.Input((1,)), out])
        >>> optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(0.1), plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="binary_crossentropy")
        >>> history = model.fit(plan.sampling.batches((x, y)), verbose=0)
        >>> calibration = dp_sparse.calibrate_probabilities(model, (x, y))
        >>> calibration.measures["auc"].value > 0.95
        True
        >>> calibrated = calibration(model)  # a Keras model, with calibrated outputs

    ### Formal Guarantees
    Those of `ScoreHistogram`: one Gaussian mechanism, whose noise the plan composed with training,
    or, with `budget`, on its own. The rest is post-processing. A plan pays for one histogram, and
    a second one is refused in the same process; another process does not know of the first, so
    keep `calibration.histogram`, or use a `Run`.
    """
    optimizer = private_optimizer_of(model, "calibrate a model that trained with one")
    if budget is None and has_folder(optimizer.plan.run_id):
        raise PrivacyError(
            "The plan of this model belongs to a Run, which keeps what its plan pays for.\n"
            "Call run.calibrate_probabilities(model, examples)."
        )
    _check(method)
    histogram = draw_histogram(
        model,
        examples,
        budget=budget,
        label_range=label_range,
        output=output,
        weight_cap=weight_cap,
        num_examples=num_examples,
    )
    return calibration_of(histogram, examples, method, _cost_of(budget))


def draw_histogram(
    model: keras.Model,
    examples: Any,
    *,
    budget: PrivacyBudget | None = None,
    label_range: tuple[float, float] | None = None,
    output: str | int | None = None,
    weight_cap: float = 1.0,
    num_examples: int | None = None,
) -> ScoreHistogram:
    """The histogram alone: counts, and noise that the plan or `budget` pays for, once.

    Args, Raises and Formal Guarantees: as `calibrate_probabilities`.
    """
    optimizer = private_optimizer_of(model, "calibrate a model that trained with one")
    run = optimizer.plan.run_id
    noise = _noise_for(optimizer.plan, budget)
    _refuse_taken(run, budget)
    tally = Tally(weight_cap)
    for part in scored(model, examples, output, label_range, num_examples):
        tally.add(*part)
    steps = int(optimizer.steps_spent)
    with _ONE_DRAWS:
        _refuse_taken(run, budget)
        if budget is None:
            _TAKEN.add(run)
        return tally.released(noise, steps, run if budget is None else None)


def calibration_of(
    histogram: ScoreHistogram, examples: Any, method: str = "platt", statement: str = ""
) -> Calibration:
    """What follows from a histogram; of the examples only the shapes and dtypes are read."""
    _check(method)
    score_map = fitted(histogram, method)
    found = measures.measured(histogram, score_map)
    return Calibration(histogram, score_map, found, statement, _inputs_like(examples))


def _check(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"Expected method in {METHODS}, got method={method!r}.")


def _noise_for(plan: PrivacyPlan, budget: PrivacyBudget | None) -> float:
    if budget is not None:
        event = dp_accounting.GaussianDpEvent
        return smallest_noise(event, epsilon=budget.epsilon, delta=budget.delta)
    noise = noise_paid_by(plan.releases)
    if noise is None:
        raise ValueError(
            f"The plan of this model pays for no score histogram.\nReserve it: {_RESERVE}; or give "
            "examples that it did not train on, with a budget= of their own."
        )
    return noise


def _refuse_taken(run: str, budget: PrivacyBudget | None) -> None:
    if budget is None and run in _TAKEN:
        raise PrivacyError(
            "The score histogram that this plan pays for was drawn: a second one would cost as "
            "much again.\nUse the Calibration that was returned, or calibration.histogram of it."
        )


def _cost_of(budget: PrivacyBudget | None) -> str:
    if budget is None:
        return ""
    return (
        "Predictions were calibrated on examples apart from those that trained the model: "
        f"({budget.epsilon:g}, {budget.delta:g})-differential privacy protects one of them, beside "
        "what else was released of them."
    )


def _inputs_like(examples: Any) -> Callable[[], Any]:
    """Makes symbolic inputs for x of the examples."""

    def of(leaf: Any, name: str | None = None) -> Any:
        leaf = np.asarray(leaf)
        dtype = "string" if leaf.dtype.kind in "OSU" else leaf.dtype.name
        return keras.Input(leaf.shape[1:], dtype=dtype, name=name)

    def inputs() -> Any:
        x, *_ = next(iter(chunks_of(examples)))
        if isinstance(x, Mapping):
            return {name: of(leaf, name) for name, leaf in x.items()}
        return tf.nest.map_structure(of, x)

    return inputs
