"""Records of a Criteo split that tensorflow-datasets has prepared, made once.

Its builders (`pipelines.criteo.datasets`) keep raw counts and categories in the order of the file,
so the records are those that the file itself would give.
"""

import contextlib
import importlib
from pathlib import Path
from typing import IO

import numpy as np

from pipelines.criteo.records import (
    PreparedData,
    PrepareError,
    Tally,
    is_made_of,
    load,
    write_pair,
)
from pipelines.criteo.schema import RAW_DTYPE, records_from_raw, validate_vocabularies
from pipelines.prepared_tfds import builder_of

_CHUNK = 2**14  # rows at once


def records_of(
    name: str, split: str, directory: str, destination: Path, vocabularies: tuple[int, ...]
) -> PreparedData:
    """The records of one split, unless `destination` has them.

    Args:
        name: `criteo_kaggle`, or `criteo_terabyte` with a config: `criteo_terabyte/first_2`.
        split: Such as `train` or `day_0`.
        directory: Where tensorflow-datasets has prepared it; empty for its default.
        destination: The records file.
        vocabularies: Hash buckets of each categorical feature.

    Raises:
        ImportError: tensorflow-datasets is not installed.
        ValueError: There is no such dataset or split, or it is not prepared.
    """
    with contextlib.suppress(ImportError):  # which `builder_of` tells
        importlib.import_module("pipelines.criteo.datasets")  # registers the builders

    sizes = validate_vocabularies(vocabularies)
    builder = builder_of(name, directory)
    if split not in builder.info.splits:
        raise PrepareError(
            f"Expected data.tfds_split to be one of {[*builder.info.splits]}, got {split!r}."
        )
    known = builder.info.metadata.get(split, {}) if builder.info.metadata else {}
    source = {
        "tfds": builder.info.full_name,
        "split": split,
        "rows": builder.info.splits[split].num_examples,
        "sha256": known.get("sha256"),
    }
    if is_made_of(source, destination, sizes):
        return load(destination)

    def write(output: IO[bytes]) -> Tally:
        tally = Tally()
        batches = builder.as_dataset(split=split, batch_size=_CHUNK, shuffle_files=False)
        for batch in batches.as_numpy_iterator():
            raw = np.empty(len(batch["label"]), RAW_DTYPE)
            raw["label"], raw["integers"] = batch["label"], batch["int"]
            raw["categories"] = batch["cat"]
            output.write(records_from_raw(raw, sizes).tobytes())
            tally.lines += len(raw)
            tally.records += len(raw)
        return tally

    return write_pair(destination, sizes, source, write)
