"""Reads examples once, in chunks, from any kind of data source; memory is that of a chunk."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, validate
from dp_sparse.sampling import data_source

_CHUNK = 2**14  # examples read at once from a data source with random access


def batches(examples: Any) -> Iterator[Any]:
    """Batches of numpy arrays, in the order of the examples."""
    sources = _sources(examples)
    if sources is None:
        stream = isinstance(examples, tf.data.Dataset)
        yield from examples.as_numpy_iterator() if stream else examples
        return
    for source in sources:
        for start in range(0, len(source), _CHUNK):
            yield source.gather(np.arange(start, min(start + _CHUNK, len(source))))


def has_length(examples: Any) -> bool:
    """Whether the number of examples is known before they are read."""
    return _sources(examples) is not None


def checked_number(examples: Any, num_examples: int | None) -> int | None:
    """How many examples to expect; None if that is not known.

    Raises:
        ValueError: `examples` repeats, is no collection of batches, or has another length.
    """
    if num_examples is not None:
        num_examples = validate.positive_integer("num_examples", num_examples)
    sources = _sources(examples)
    if sources is not None:
        length = sum(len(source) for source in sources)
        if num_examples not in (None, length):
            raise ValueError(
                f"Expected num_examples={length}, the length of examples, got "
                f"num_examples={num_examples}."
            )
        return length
    if isinstance(examples, Mapping | str) or not isinstance(examples, Iterable):
        raise ValueError(
            "Expected a dp_sparse.RecordFile or a list of them, arrays (x, y), a tf.data.Dataset "
            f"of batches or another iterable of batches, got {type(examples).__name__}."
        )
    endless = tf.data.INFINITE_CARDINALITY
    if isinstance(examples, tf.data.Dataset) and examples.cardinality() == endless:
        raise ValueError("Expected a finite dataset, got one that repeats: leave repeat() out.")
    return num_examples


def _sources(examples: Any) -> list[data_source.DataSource] | None:
    """The data sources with random access in `examples`; None if it is a stream."""
    if isinstance(examples, tuple):
        return [data_source.as_data_source(examples)]
    found = examples if isinstance(examples, list) and examples else [examples]
    return found if all(hasattr(source, "gather") for source in found) else None


def parts_of(batch: Any) -> tuple[Mapping[str, Any], Any, Any]:
    """`(x, y, sample_weight)` of a batch, None for what it does not have.

    Raises:
        ValueError: x does not map names to ids.
        PrivacyError: A sampler made the batch.
    """
    parts = batch if isinstance(batch, tuple) else (batch,)
    x, y, weights = (*parts, None, None)[:3]
    if isinstance(weights, Mapping) and "marker" in weights:
        raise PrivacyError(
            "Expected each example once, got batches of a sampler, which may hold an example "
            "several times: pass the dataset that the sampler was given."
        )
    if len(parts) > 3 or not isinstance(x, Mapping):
        raise ValueError(
            "Expected batches x, (x, y) or (x, y, sample_weight) whose x maps the names of tables "
            f"to ids, got {type(x).__name__} in a batch of {len(parts)}."
        )
    return x, y, weights


def weighty_examples(weights: Any) -> np.ndarray | None:
    """bool `[batch]`: whether some weight of an example is not 0; None if that holds for all."""
    if weights is None:
        return None
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(weights)]
    weighty = [np.any(leaf.reshape(len(leaf), -1) != 0, axis=1) for leaf in leaves]
    present = np.logical_or.reduce(weighty)
    return None if present.all() else present
