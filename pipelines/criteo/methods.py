"""The optimizer of the click model, and its rows selected before training."""

import functools

import keras
import ml_collections
import numpy as np

import dp_sparse
from pipelines.criteo.records import PreparedData
from pipelines.criteo.schema import NUM_INTEGERS, examples_from_records
from pipelines.criteo.sources import Training, read_once, sampling_of
from pipelines.methods import calibrated, noise_source_of, optimizer_under
from pipelines.runs import Run


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
    select = functools.partial(_rows, config, data, training)
    build = functools.partial(optimizer_under, config)
    share = calibration_share(config, training)
    sampling = sampling_of(config, training, steps)
    return build(*calibrated(config, sampling, select, build, run, share))


def calibration_share(config: ml_collections.ConfigDict, training: Training) -> float:
    """The part of ε for calibrated probabilities; 0 where examples cannot be read once each."""
    once = config.tables == "keras" and not isinstance(training, dp_sparse.OfflineBatches)
    return config.privacy.calibration_share if once else 0.0


def calibration_of(
    config: ml_collections.ConfigDict,
    model: keras.Model,
    data: PreparedData,
    training: Training,
    run: Run | None = None,
) -> dp_sparse.Calibration | None:
    """Calibrated probabilities of the trained model, if its plan pays for them."""
    if not calibration_share(config, training):
        return None
    examples = read_once(training, data, examples_from_records)
    if run is not None:
        return run.calibrate_probabilities(model, examples)
    return dp_sparse.calibrate_probabilities(model, examples)


def _rows(
    config: ml_collections.ConfigDict,
    data: PreparedData,
    training: Training,
    plan: dp_sparse.PrivacyPlan,
) -> dp_sparse.SelectedRows:
    """The `config.selection.rows` most frequent rows, for the share `selection.share` of ε."""
    settings, source = config.selection, noise_source_of(config)
    tables = dict(zip(table_names(len(data.vocabularies)), data.vocabularies, strict=True))
    noise = dp_sparse.calibrate_top_k(plan, tables, settings.rows, source, share=settings.share)
    named = read_once(training, data, _categories_by_table)
    return dp_sparse.select_top_k(named, tables, settings.rows, noise.source, progress=False)


def table_names(count: int) -> list[str]:
    """The names of the layers that hold the tables in the model."""
    return [f"category_{index + NUM_INTEGERS + 1}" for index in range(count)]


def _categories_by_table(records: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each table's ids under its name, and the labels."""
    ids = records["categories"]
    named = {name: ids[:, i] for i, name in enumerate(table_names(ids.shape[1]))}
    return named, records["label"]
