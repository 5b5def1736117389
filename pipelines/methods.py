"""The methods by name: the plan and the optimizer of each, the same for every job.

A config has `method`, `privacy` with `epsilon`, `delta` and `clip_norm`, `optimizer`, `adafest`,
and `exponential` if the job offers that method. `privacy.clip_quantile`, if it has one, is the
quantile of the gradients' norms that the clip norm follows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import ml_collections

import dp_sparse
from pipelines.optimizers import optimizer_of
from pipelines.runs import Run

NON_PRIVATE = "non_private"
PRIVATE = (
    "dp_sgd",
    "lazy_dp_sgd",
    "dp_adafest",
    "dp_fest",
    "dp_adafest_plus",
    "exponential",
)
METHODS = (NON_PRIVATE, *PRIVATE)
WITH_ROWS = ("dp_fest", "dp_adafest_plus")
NOISE_SOURCES = {
    "gaussian": dp_sparse.GaussianTopK,
    "gumbel": dp_sparse.GumbelTopK,
    "laplace": dp_sparse.LaplaceTopK,
}

Select = Callable[[dp_sparse.PrivacyPlan], dp_sparse.SelectedRows]
Build = Callable[[dp_sparse.PrivacyPlan, dp_sparse.SelectedRows | None], keras.optimizers.Optimizer]


def calibrated(
    config: ml_collections.ConfigDict,
    sampling: Any,
    select: Select,
    build: Build,
    run: Run | None = None,
    calibration_share: float = 0.0,
) -> tuple[dp_sparse.PrivacyPlan, dp_sparse.SelectedRows | None]:
    """The calibrated plan of a run, and the rows of a method that selects them before training.

    A run that goes on has its own rows and plan already.

    Args:
        config: Of the run.
        sampling: How its batches are drawn.
        select: Selects rows, given the plan that does not pay for them yet.
        build: Makes the optimizer; called with stand-ins before rows are selected, which would be
            spent if it refused a setting only afterwards.
        run: What the run keeps; None if it keeps nothing.
        calibration_share: The part of ε for calibrated probabilities; 0 for none.

    Raises:
        ValueError: A number of `config` is out of its range.
    """
    plan = _plan(config, sampling)
    rows = None
    if config.method in WITH_ROWS:
        build(stand_in(plan), stand_in_rows(config))
        selected = functools.partial(select, plan)
        rows = selected() if run is None else run.rows(selected)
    releases = (rows.release,) if rows is not None and rows.costs else ()
    plan = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, plan.mechanism, releases)

    def make() -> dp_sparse.PrivacyPlan:
        share = calibration_share
        return (dp_sparse.reserve_calibration(plan, share) if share else plan).calibrate()

    return (make() if run is None else run.plan(make)), rows


def optimizer_under(
    config: ml_collections.ConfigDict,
    plan: dp_sparse.PrivacyPlan,
    rows: dp_sparse.SelectedRows | None,
    wrapped: keras.optimizers.Optimizer | None = None,
    table_optimizer: keras.optimizers.Optimizer | None = None,
    microbatch_size: int | None = None,
) -> keras.optimizers.Optimizer:
    """The optimizer of `config.method` under a calibrated plan that pays for `rows`.

    Args:
        config: Of the run.
        plan: Its plan.
        rows: What was selected, for a method that needs it.
        wrapped: Keras' optimizer; by default `config.optimizer`.
        table_optimizer: That of the tables, for methods that update chosen rows of them.
        microbatch_size: Examples of a batch that are clipped at once; by default all. Exponential
            selection has no micro-batches.

    Raises:
        ValueError: There is no such method, or a number of `config` is out of its range.
    """
    wrapped = optimizer_of(config, steps=plan.sampling.steps) if wrapped is None else wrapped
    given: dict[str, Any] = {"clip_norm": config.privacy.clip_norm, "clipping": _clipping(config)}
    if microbatch_size is not None:
        given["microbatch_size"] = microbatch_size
    by_row = {**given, "table_optimizer": table_optimizer}
    match config.method:
        case "dp_sgd":
            return dp_sparse.DPSGDOptimizer(wrapped, plan, **given)
        case "lazy_dp_sgd":
            return dp_sparse.LazyDPSGDOptimizer(wrapped, plan, **given)
        case "dp_fest":
            assert rows is not None
            return dp_sparse.DPFESTOptimizer(wrapped, plan, **by_row, rows=rows)
        case "exponential":
            return dp_sparse.ExponentialSelectionOptimizer(wrapped, plan, **given)
        case "dp_adafest" | "dp_adafest_plus":
            own = _adafest(config, plan.sampling.steps)
            return dp_sparse.DPAdaFESTOptimizer(wrapped, plan, **by_row, **own, rows=rows)
        case _:
            raise ValueError(f"Expected method among {PRIVATE}, got method={config.method!r}.")


def _clipping(config: ml_collections.ConfigDict) -> dp_sparse.QuantileClipping | None:
    """How gradients are clipped if the config has a quantile; otherwise the clip norm stays."""
    quantile = config.privacy.get("clip_quantile", 0.0)
    return dp_sparse.QuantileClipping(quantile) if quantile else None


def _adafest(config: ml_collections.ConfigDict, steps: int) -> dict[str, Any]:
    """The settings of DP-AdaFEST: a threshold takes the place of expected false rows.

    A window is no longer than the run.
    """
    given = {"window": 1, **config.adafest}
    given["window"] = min(given["window"], steps)
    if given["threshold"] is not None:
        del given["expected_false_rows"]
    return given


def stand_in(plan: dp_sparse.PrivacyPlan) -> dp_sparse.PrivacyPlan:
    """The plan with so much noise that any number of steps has an ε; for what does not train."""
    return plan.with_noise(1000.0)


def stand_in_rows(config: ml_collections.ConfigDict) -> dp_sparse.SelectedRows | None:
    """Rows of no table, for a method that needs some; for what does not train."""
    return dp_sparse.SelectedRows.public({"": [0]}, {"": 1}) if config.method in WITH_ROWS else None


def noise_source_of(config: ml_collections.ConfigDict, others: Sequence[str] = ()) -> Any:
    """The noise source that `config.selection.source` names.

    Args:
        config: Of the run.
        others: Sources without noise that the job has, too.

    Raises:
        ValueError: There is none.
    """
    if config.selection.source not in NOISE_SOURCES:
        raise ValueError(
            f"Expected selection.source to be one of {(*NOISE_SOURCES, *others)}, got "
            f"selection.source={config.selection.source!r}."
        )
    return NOISE_SOURCES[config.selection.source]


def _plan(config: ml_collections.ConfigDict, sampling: Any) -> dp_sparse.PrivacyPlan:
    return dp_sparse.PrivacyPlan(
        budget=dp_sparse.PrivacyBudget(
            epsilon=config.privacy.epsilon,
            delta=config.privacy.delta or 1 / sampling.num_examples,
        ),
        sampling=sampling,
        mechanism=(
            dp_sparse.ExponentialSelection(**config.exponential)
            if config.method == "exponential"
            else dp_sparse.GaussianMechanism()
        ),
    )
