"""`calibrate_probabilities`: predictions that are probabilities again, at a small share of ε.

Clipping gives nearly every example a gradient of the same length, so a private model ranks well and
is too sure or not sure enough: its log loss may be worse than a constant's. A noisy histogram of
scores repairs that after training, and measures the run on its own data.
"""

import dataclasses
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import (
    PrivacyBudget,
    PrivacyPlan,
    has_folder,
    release_noise,
    smallest_noise,
)
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


class _Drawn(NamedTuple):
    """A histogram, and the model whose predictions it counts."""

    histogram: ScoreHistogram
    model: weakref.ref[keras.Model]


_DRAWN: dict[str, _Drawn] = {}  # by the run of the plan that pays, in this process
_ONE_DRAWS = threading.Lock()
_RESERVE = "plan = dp_sparse.reserve_calibration(plan, share=0.01), before training"


def reserve_calibration(plan: PrivacyPlan, share: float = 0.01) -> PrivacyPlan:
    """A plan that also pays for one `calibrate_probabilities`; call its `calibrate()` next.

    The histogram is composed with training in one privacy loss. At share=0.01 training's noise
    grows by less than 1 %. It takes some seconds.

    Args:
        plan: A plan that does not pay for one, whether its noise is known or not.
        share: The part of ε for the histogram, in (0, 1).

    Raises:
        ValueError: The plan pays for one already, `share` is out of its range, batches beyond the
            capacity take all of δ, or no noise meets its budget.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=8000, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling)
        >>> plan = dp_sparse.reserve_calibration(plan, share=0.1)
        >>> print(plan.releases[0].name)
        score histogram of 34 bins, to calibrate probabilities (Gaussian noise of standard
        deviation ... on each count)

    ### Formal Guarantees
    Those of the plan, whose `calibrate` counts the release with all steps.
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
            with "calibrated_" in front those of calibrated predictions. With several classes, a
            positive is an example whose label is the class with the largest probability.
        specs: A `tf.TensorSpec` `[batch, ...]` of each input, as a nest, for models that are not
            functional; None if they are not known.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=400, batch_size=200)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling)
        >>> plan = dp_sparse.reserve_calibration(plan, share=0.5).calibrate()
        >>> out = keras.layers.Dense(1, activation="sigmoid")
        >>> model = keras.Sequential([keras.Input((1,)), out])
        >>> optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="binary_crossentropy")
        >>> data = np.linspace(-1, 1, 400)[:, None], np.arange(400) % 2
        >>> calibration = dp_sparse.calibrate_probabilities(model, data)
        >>> round(calibration.measures["rate"].value, 1)
        0.5
        >>> calibration(model).predict(data[0], verbose=0).shape
        (400, 1)
    """

    histogram: ScoreHistogram
    score_map: ScoreMap
    measures: Mapping[str, Measure]
    specs: Any = dataclasses.field(repr=False, default=None)

    def __call__(self, model: keras.Model) -> keras.Model:
        """A model with the calibrated output, of Keras' own layers; it shares the model's weights.

        Inputs and outputs have the shapes of the model's. Layers behind the model do not train.

        Raises:
            ValueError: The model has not the output that was calibrated.
        """
        inputs = None if self.specs is None else _symbolic(self.specs)
        return with_head(model, self.score_map, self.histogram, inputs)

    def rows(self) -> list[tuple[str, str, str]]:
        """Each measure as text: its name, its value before, and calibrated; empty if there is none.

        A value is followed by its standard error.
        """
        return measures.as_table(self.measures)

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {before}{after and f' -> {after}'}" for name, before, after in self.rows()
        )

    def section(self) -> str:
        """Measures and the reliability diagram as HTML, for `PrivacyReport.add_section`.

        Raises:
            ImportError: matplotlib is missing; the message names the extra that installs it.
        """
        headers = ["of the examples that were counted", "before", "calibrated"]
        note = "Scores count as the middle of their bin; ± is the standard error of the noise."
        drawn = report_page.svg(figure(self.histogram, self.score_map))
        return report_page.table(headers, self.rows()) + report_page.text(note) + drawn

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
    """Draws the histogram that the plan pays for, and fits a map of predictions to it.

    It costs one prediction of each example, and some ten of 128 of them. Call it after training.
    While the plan pays, another call gets the same histogram; with `budget=`, every call draws a
    new one and spends that budget again. In a `Run`, call `run.calibrate_probabilities`, which
    keeps it.

    Args:
        model: The trained model, compiled with a private optimizer.
        examples: Those that it trained on under this plan, each once: arrays
            `(x, y[, sample_weight])`, a data source, or a `tf.data.Dataset` of batches of one
            shape. Labels `[n]` or `[n, 1]`, or one-hot `[n, classes]`; weights `[n]`. Not the
            batches of a sampler.
        method: "platt" (an affine map of log odds, or of a regression's predictions) or "isotonic".
        budget: For examples that the model did not train on: what each call may cost on its own,
            beside the plan. By default the model's plan pays.
        label_range: The least and the largest label of a regression: public, not taken from data.
        output: The name or place of the output, if the model has several.
        weight_cap: Larger sample weights count as this one. Public.
        num_examples: How many examples there are, if `examples` does not tell.

    Returns:
        The map, and measures of the examples.

    Raises:
        ValueError: An argument out of its range, predictions or labels of another kind, another
            number of examples, a plan without room for it, a model with a `predict_step` of its
            own, or a strategy of several workers.
        BadExampleError: A label or a weight out of its range.
        PrivacyError: The plan's histogram was drawn for another model or with other arguments, its
            run has a folder, an example or a prediction depends on other examples, or `examples`
            are batches of a sampler.

    Warns:
        UserWarning: Too few examples stand out from the noise, so predictions stay as they are; or
            the model has trained on since the histogram was drawn.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=4000, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling)
        >>> plan = dp_sparse.reserve_calibration(plan, share=0.1).calibrate()
        >>> x = np.random.default_rng(1).normal(size=(4000, 1))
        >>> y = (x[:, 0] > 0).astype(float)
        >>> out = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((1,)), out])
        >>> optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(0.1), plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="binary_crossentropy")
        >>> history = model.fit(plan.sampling.batches((x, y)), verbose=0)
        >>> calibration = dp_sparse.calibrate_probabilities(model, (x, y))
        >>> calibration.measures["auc"].value > 0.9
        True
        >>> calibrated = calibration(model)  # a Keras model, with calibrated outputs

    ### Formal Guarantees
    Those of `ScoreHistogram`: one Gaussian mechanism, whose noise the plan composed with training,
    or, with `budget`, on its own. The rest is post-processing. A plan pays for one histogram of the
    `num_examples` of its sampling: a second call in the same process gets the same one. Another
    process does not know of it, so save `calibration.histogram`, or use a `Run`. Public besides:
    that no prediction was outside of [0, 1] where probabilities are expected.
    """
    require_method(method)
    histogram = draw_histogram(
        model,
        examples,
        budget=budget,
        label_range=label_range,
        output=output,
        weight_cap=weight_cap,
        num_examples=num_examples,
    )
    warn_if_trained_on(histogram, model, stacklevel=2)
    return calibration_of(histogram, examples, method)


def draw_histogram(
    model: keras.Model,
    examples: Any,
    *,
    budget: PrivacyBudget | None = None,
    label_range: tuple[float, float] | None = None,
    output: str | int | None = None,
    weight_cap: float = 1.0,
    num_examples: int | None = None,
    kept: bool = False,
) -> ScoreHistogram:
    """The histogram alone: counts, and noise that the plan or `budget` pays for, once.

    Args, Raises and Formal Guarantees: as `calibrate_probabilities`; `kept` says that the caller is
    the `Run` of the plan, and keeps it in its folder.
    """
    optimizer = private_optimizer_of(model, "calibrate a model that trained with one")
    _refuse_own_predictions(model)
    if budget is None and has_folder(optimizer.plan.run_id) and not kept:
        raise PrivacyError(
            "The plan of this model belongs to a Run, which keeps what its plan pays for.\n"
            "Call run.calibrate_probabilities(model, examples)."
        )
    noise = _noise_for(optimizer.plan, budget)
    payer = optimizer.plan.run_id if budget is None else None
    if payer in _DRAWN:
        return _drawn_before(payer, model, label_range, output, weight_cap)
    tally = Tally(weight_cap)
    of_plan = optimizer.plan.sampling.num_examples if budget is None else None
    for part in scored(model, examples, output, label_range, num_examples, of_plan):
        tally.add(*part)
    tally.require_examples()
    spent = None if budget is None else (budget.epsilon, budget.delta)
    with _ONE_DRAWS:
        if payer in _DRAWN:
            return _drawn_before(payer, model, label_range, output, weight_cap)
        histogram = tally.released(noise, int(optimizer.steps_spent), payer, spent)
        if payer is not None:
            _DRAWN[payer] = _Drawn(histogram, weakref.ref(model))
    return histogram


def _drawn_before(
    payer: str,
    model: keras.Model,
    label_range: tuple[float, float] | None,
    output: str | int | None,
    weight_cap: float,
) -> ScoreHistogram:
    """The histogram that the plan paid for; raises PrivacyError if another one is asked for."""
    histogram, of_model = _DRAWN[payer]
    if of_model() is not model:
        raise PrivacyError(
            "The score histogram that this plan pays for was drawn from another model's "
            "predictions: a second one would cost as much again.\nUse the Calibration that was "
            "returned then."
        )
    require_asked(histogram, label_range, output, weight_cap)
    return histogram


def require_asked(
    histogram: ScoreHistogram,
    label_range: tuple[float, float] | None = None,
    output: str | int | None = None,
    weight_cap: float = 1.0,
) -> None:
    """Raises PrivacyError if a histogram was drawn with other arguments than these."""
    was = (histogram.kind.label_range, histogram.kind.output, histogram.weight_cap)
    asked = (None if label_range is None else tuple(label_range), output, weight_cap)
    for name, before, now in zip(("label_range", "output", "weight_cap"), was, asked, strict=True):
        if before != now:
            raise PrivacyError(
                f"The score histogram that this plan pays for was drawn with {name}={before!r}, "
                f"got {name}={now!r}.\nA second one would cost as much again: pass "
                f"{name}={before!r}, or give other examples with a budget= of their own."
            )


def warn_if_trained_on(histogram: ScoreHistogram, model: keras.Model, stacklevel: int) -> None:
    """Warns if the model took steps since its histogram was drawn."""
    spent = int(model.optimizer.steps_spent)
    if histogram.steps != spent:
        warnings.warn(
            f"The score histogram was drawn after {histogram.steps} steps, and the model has taken "
            f"{spent}: its predictions may have moved since.",
            stacklevel=stacklevel + 1,
        )


def _refuse_own_predictions(model: keras.Model) -> None:
    """Raises ValueError for a `predict_step` of one's own, and for several workers."""
    if type(model).predict_step is not keras.Model.predict_step:
        raise ValueError(
            f"Expected a model that predicts by call, got {type(model).__name__}, which has a "
            "predict_step of its own.\nMove what it does into call."
        )
    if isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "Expected one process to calibrate, got a strategy of several workers, each of which "
            "would draw.\nExport the model, and calibrate it where it is loaded."
        )


def calibration_of(
    histogram: ScoreHistogram, examples: Any = None, method: str = "platt"
) -> Calibration:
    """What follows from a histogram, also from a loaded one, at no cost.

    Args:
        histogram: What was released.
        examples: Of which only the shapes and dtypes are read, for a model that is not functional.
        method: "platt" or "isotonic".

    Raises:
        ValueError: Another method.
    """
    require_method(method)
    score_map = fitted(histogram, method)
    found = measures.measured(histogram, score_map)
    return Calibration(histogram, score_map, found, _specs_of(examples))


def require_method(method: str) -> None:
    """Raises ValueError for a method that there is not."""
    if method not in METHODS:
        raise ValueError(f"Expected method in {METHODS}, got method={method!r}.")


def _noise_for(plan: PrivacyPlan, budget: PrivacyBudget | None) -> float:
    if budget is not None:
        event = dp_accounting.GaussianDpEvent
        return smallest_noise(event, epsilon=budget.epsilon, delta=budget.delta)
    noise = noise_paid_by(plan.releases)
    if noise is None:
        raise ValueError(
            f"The plan of this model pays for no score histogram.\nReserve it: {_RESERVE}, also "
            "for a Run; or give examples that it did not train on, with a budget= of their own."
        )
    return noise


def _specs_of(examples: Any) -> Any:
    """Specs of x of the examples; None if they cannot be read again."""
    again = examples is not None and not isinstance(examples, Iterator)
    chunk = next(iter(chunks_of(examples)), None) if again else None
    if chunk is None:
        return None

    def of(leaf: Any, name: str | None = None) -> tf.TensorSpec:
        leaf = np.asarray(leaf)
        dtype = tf.string if leaf.dtype.kind in "OSU" else tf.as_dtype(leaf.dtype)
        return tf.TensorSpec([None, *leaf.shape[1:]], dtype, name)

    x, *_ = chunk
    if isinstance(x, Mapping):
        return {name: of(leaf, name) for name, leaf in x.items()}
    return tf.nest.map_structure(of, x)


def _symbolic(specs: Any) -> Any:
    def of(spec: tf.TensorSpec) -> Any:
        return keras.Input(spec.shape[1:], dtype=spec.dtype.name, name=spec.name)

    return tf.nest.map_structure(of, specs)
