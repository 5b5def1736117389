"""Datasets that tensorflow-datasets has prepared before: nothing is downloaded by a job."""

from typing import Any


def builder_of(name: str, directory: str) -> Any:
    """The builder of a dataset that is prepared.

    Args:
        name: As tensorflow-datasets has it, such as `glue/sst2`.
        directory: Where it is prepared; empty for the default.

    Raises:
        ImportError: tensorflow-datasets is not installed.
        ValueError: There is no such dataset, or it is not prepared.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            "data.tfds needs tensorflow-datasets: pip install '.[data]' in the clone."
        ) from error
    try:
        builder = tfds.builder(name, data_dir=directory or None)
        prepared = builder.is_prepared()
    except Exception as error:  # of several kinds, such as a description that is not there
        raise ValueError(f"Expected {name} of tensorflow-datasets, got {error}") from error
    if not prepared:
        raise ValueError(
            f"Expected {name} to be prepared in {builder.data_dir}, got nothing there: run "
            f"`tfds build {name}` where there is a network, or give data.path."
        )
    return builder
