"""The methods to train the click model: the plan and the optimizer of each."""

import functools
from typing import Any

import keras
import ml_collections
import numpy as np

import dp_sparse
from pipelines.criteo.records import PreparedData
from pipelines.criteo.schema import NUM_INTEGERS
from pipelines.criteo.sources import Sampling, Training, read_once, sampling_of
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
_SOURCES = {
    "gaussian": dp_sparse.GaussianTopK,
    "gumbel": dp_sparse.GumbelTopK,
    "laplace": dp_sparse.LaplaceTopK,
}


def private_optimizer(
    config: ml_collections.ConfigDict,
    data: PreparedData,
    training: Training,
    steps: int,
    run: Run | None = None,
) -> keras.optimizers.Optimizer:
    """The optimizer of `config.method` with a calibrated plan; selects rows first if needed.

    A run that goes on has its own rows and plan already.

    Raises:
        ValueError: A number of `config` is out of its range.
    """
    plan = _plan(config, sampling_of(config, training, steps))
    rows = None
    if config.method in WITH_ROWS:
        select = functools.partial(_rows, config, plan, data, training)
        rows = select() if run is None else run.rows(select)
    releases = (rows.release,) if rows is not None and rows.costs else ()
    plan = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, plan.mechanism, releases)
    plan = plan.calibrate() if run is None else run.plan(plan.calibrate)
    return optimizer_under(config, plan, rows)


def optimizer_under(
    config: ml_collections.ConfigDict,
    plan: dp_sparse.PrivacyPlan,
    rows: dp_sparse.SelectedRows | None,
) -> keras.optimizers.Optimizer:
    """The optimizer of `config.method` under a calibrated plan that pays for `rows`.

    Raises:
        ValueError: There is no such method, or a number of `config` is out of its range.
    """
    given: dict[str, Any] = {"clip_norm": config.privacy.clip_norm}
    wrapped = optimizer_of(config)
    match config.method:
        case "dp_sgd":
            return dp_sparse.DPSGDOptimizer(wrapped, plan, **given)
        case "lazy_dp_sgd":
            return dp_sparse.LazyDPSGDOptimizer(wrapped, plan, **given)
        case "dp_fest":
            assert rows is not None
            return dp_sparse.DPFESTOptimizer(wrapped, plan, **given, rows=rows)
        case "exponential":
            return dp_sparse.ExponentialSelectionOptimizer(wrapped, plan, **given)
        case "dp_adafest" | "dp_adafest_plus":
            return dp_sparse.DPAdaFESTOptimizer(wrapped, plan, **given, **config.adafest, rows=rows)
        case _:
            raise ValueError(f"Expected method among {PRIVATE}, got method={config.method!r}.")


def _plan(config: ml_collections.ConfigDict, sampling: Sampling) -> dp_sparse.PrivacyPlan:
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


def _rows(
    config: ml_collections.ConfigDict,
    plan: dp_sparse.PrivacyPlan,
    data: PreparedData,
    training: Training,
) -> dp_sparse.SelectedRows:
    """The `config.selection.rows` most frequent rows, for the share `selection.share` of ε."""
    settings = config.selection
    if settings.source not in _SOURCES:
        raise ValueError(
            f"Expected selection.source to be one of {tuple(_SOURCES)}, got {settings.source!r}."
        )
    tables = dict(zip(table_names(len(data.vocabularies)), data.vocabularies, strict=True))
    calibrated = dp_sparse.calibrate_top_k(
        plan, tables, settings.rows, _SOURCES[settings.source], share=settings.share
    )
    named = read_once(training, data, _categories_by_table)
    return dp_sparse.select_top_k(named, tables, settings.rows, calibrated.source, progress=False)


def table_names(count: int) -> list[str]:
    """The names of the layers that hold the tables in the model."""
    return [f"category_{index + NUM_INTEGERS + 1}" for index in range(count)]


def _categories_by_table(records: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each table's ids under its name, and the labels."""
    ids = records["categories"]
    named = {name: ids[:, i] for i, name in enumerate(table_names(ids.shape[1]))}
    return named, records["label"]
