"""What trains and what is held out: the first records of a file, or other files whole.

`data.path` names a file whose last records are held out. With `data.stream`, raw files that are
read in their order, or `data.offline`, a folder of batches that were drawn before training, all of
that file's records are held out.
"""

from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

import dp_sparse
from pipelines.criteo.days import check_different
from pipelines.criteo.raw_rows import RawRows
from pipelines.criteo.records import PreparedData
from pipelines.criteo.schema import RECORD_DTYPE, examples_from_fields, examples_from_records

Training = dp_sparse.RecordFile | RawRows | dp_sparse.OfflineBatches
Sampling = dp_sparse.PoissonSampling | dp_sparse.StreamSampling
Unpack = Callable[[np.ndarray], tuple[Any, Any]]


def parts(
    config: ml_collections.ConfigDict, data: PreparedData, unpack: Unpack = examples_from_records
) -> tuple[Training, dp_sparse.RecordFile | None, dp_sparse.RecordFile]:
    """Training, validation (or None) and held-out rows, in the order of time.

    Raises:
        ValueError: A number is out of its range, or the config names two sources.
    """
    settings = config.data
    if not settings.stream and not settings.offline:
        return _split(data, settings, unpack)
    if settings.stream and settings.offline:
        raise ValueError("Expected data.stream or data.offline, got both: leave one empty.")
    if config.method == "non_private":
        raise ValueError(
            "Expected a private method with data.stream or data.offline, got method='non_private': "
            "it shuffles prepared records, data.path."
        )
    held_out = dp_sparse.RecordFile(data.path, RECORD_DTYPE, unpack)
    if settings.offline:
        if config.tables != "keras":
            raise ValueError(f"Expected tables=keras with data.offline, got {config.tables!r}.")
        service = settings.service or None
        batches = dp_sparse.OfflineBatches(settings.offline, examples_from_fields, service)
        _check_vocabularies(batches.manifest.about, data)
        return batches, None, held_out
    return _stream(config, data, unpack), None, held_out


def _stream(config: ml_collections.ConfigDict, data: PreparedData, unpack: Unpack) -> RawRows:
    settings = config.data
    if settings.num_examples < 1:
        raise ValueError(
            f"Expected data.num_examples, the lines of data.stream, got {settings.num_examples}: "
            "count them, for example by wc -l."
        )
    paths = settings.stream.split(",")
    if settings.path:
        check_different([*paths, settings.path])  # nobody trains on what is held out
    return RawRows(
        paths,
        settings.num_examples,
        data.vocabularies,
        unpack,
        quarantine=f"{config.report.directory}/quarantine",
        files_at_once=settings.files_at_once,
    )


def _check_vocabularies(about: Any, data: PreparedData) -> None:
    prepared = tuple(about.get("vocabularies", ()))
    if prepared != data.vocabularies:
        raise ValueError(
            f"Expected batches of data.vocabularies={data.vocabularies}, got {prepared}: prepare "
            "both alike."
        )


def sampling_of(config: ml_collections.ConfigDict, training: Training, steps: int) -> Sampling:
    """How the batches of a private run are drawn."""
    if isinstance(training, dp_sparse.OfflineBatches):
        return dp_sparse.offline_sampling(training)
    batch_size = config.training.batch_size
    if isinstance(training, RawRows):
        return dp_sparse.StreamSampling(len(training), batch_size, _passes(config))
    return dp_sparse.PoissonSampling(
        num_examples=len(training), expected_batch_size=batch_size, steps=steps
    )


def title_of(config: ml_collections.ConfigDict, data: PreparedData) -> str:
    """What a report is about: the files and how many rows."""
    name = config.data.path or f"{config.data.tfds}, {config.data.tfds_split}"
    held_out = f"{name}: {data.num_records} rows"
    trains = config.data.stream or config.data.offline
    return f"{trains}; held out: {held_out}" if trains else held_out


def schedule(config: ml_collections.ConfigDict, training: Training) -> tuple[int, int, int | None]:
    """Keras epochs (one for each evaluation), all steps, and the steps of an epoch.

    None if epochs do not have the same number: the last one then takes the rest.

    Raises:
        ValueError: There are fewer rows than a batch has.
    """
    batch_size = config.training.batch_size
    if not isinstance(training, dp_sparse.OfflineBatches) and len(training) < batch_size:
        raise ValueError(
            f"Expected a batch of rows to train on, got {len(training):,} rows and "
            f"training.batch_size={batch_size:,}: give more rows or a smaller batch."
        )
    if isinstance(training, dp_sparse.RecordFile):
        wanted = max(1, round(config.training.epochs * len(training) / batch_size))
    else:
        wanted = sampling_of(config, training, steps=0).steps
    epochs = max(1, min(config.training.evaluations, wanted))
    if isinstance(training, dp_sparse.RecordFile):
        wanted = wanted // epochs * epochs
    return epochs, wanted, None if wanted % epochs else wanted // epochs


def batches_from(sampling: Any, training: Training, first_step: int) -> tf.data.Dataset:
    """The run's batches from a step on; those drawn at random have no order to go on in."""
    if isinstance(training, dp_sparse.RecordFile):
        return sampling.batches(training)
    return sampling.batches(training, first_step=first_step)


def read_once(training: Training, data: PreparedData, unpack: Unpack) -> Any:
    """The examples that train, each once, to select rows from.

    Raises:
        ValueError: They cannot be read once.
    """
    if isinstance(training, dp_sparse.OfflineBatches):
        raise ValueError(
            "Expected a method without selected rows with data.offline, whose batches have an "
            "example in several steps or in none: take dp_adafest."
        )
    if isinstance(training, RawRows):
        return training.unpacked_by(unpack)
    return dp_sparse.RecordFile(data.path, RECORD_DTYPE, unpack, 0, len(training))


def _passes(config: ml_collections.ConfigDict) -> int:
    epochs = config.training.epochs
    if epochs != int(epochs) or epochs < 1:
        raise ValueError(f"Expected whole passes over data.stream, got training.epochs={epochs}.")
    return int(epochs)


def _split(
    data: PreparedData, config: ml_collections.ConfigDict, unpack: Unpack
) -> tuple[dp_sparse.RecordFile, dp_sparse.RecordFile | None, dp_sparse.RecordFile]:
    held_out, chosen_by = config.test_fraction, config.validation_fraction
    if not 0 < held_out < 1:
        raise ValueError(f"Expected 0 < data.test_fraction < 1, got {held_out}.")
    if not 0 <= chosen_by < 1 - held_out:
        raise ValueError(
            f"Expected 0 <= data.validation_fraction < {1 - held_out:g}, got {chosen_by}."
        )
    total = data.num_records
    ends = [round(total * (1 - held_out - chosen_by)), round(total * (1 - held_out)), total]
    if not 0 < ends[0] <= ends[1] < total:
        raise ValueError(f"Expected rows to train on and rows to hold out, got {total} in all.")
    training, validation, test = (
        dp_sparse.RecordFile(data.path, RECORD_DTYPE, unpack, *part)
        for part in zip([0, *ends], ends, strict=False)
    )
    return training, validation if len(validation) else None, test
