"""Batches of examples that are read by their index, as a dataset; O(batch) a batch."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from dp_sparse.core import marked
from dp_sparse.sampling import (
    batch,
    data_source,
    held_out,
    input_guard,
    marker,
    padding,
    row_check,
)

Draws = Callable[[], Iterator[tuple[np.ndarray, marker.Marker]]]

_NOBODY = marker.Marker(0, 0, 0)


def dataset(
    source: data_source.DataSource,
    draws: Draws,
    part: tuple[int, int],
    steps: int,
    class_weight: dict[int, float] | None = None,
) -> tf.data.Dataset:
    """`steps` batches; each time they are read, `draws` gives new indices and markers.

    Args:
        source: Where the examples come from.
        draws: For each batch the indices of its examples, int64 `[n]`, and its marker.
        part: Which places of a batch are made: the first, and the one after the last.
        steps: How many batches `draws` gives.
        class_weight: A factor for the sample weight of each label.
    """
    make = functools.partial(_batch, source, part, class_weight)

    def generate() -> Iterator[Any]:
        with marked():
            for index, (indices, mark) in enumerate(draws()):
                yield make(indices, mark, compared=row_check.due(index))

    signature = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, padding.tf_dtype(leaf)),
        make(np.zeros(0, np.int64), _NOBODY),
    )
    batches = tf.data.Dataset.from_generator(generate, output_signature=signature)
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
    held_out.remember(batches, getattr(source, "examples", None))
    return input_guard.own(batches)


def _batch(
    source: data_source.DataSource,
    part: tuple[int, int],
    class_weight: dict[int, float] | None,
    indices: np.ndarray,
    mark: marker.Marker,
    compared: bool = False,
) -> Any:
    begin, end = part
    own = indices[begin:end]

    def gather(places: np.ndarray) -> tuple[Any, Any, Any]:
        return data_source.unpacked(source.gather(places))

    x, y, weights = gather(own)
    data_source.refuse_other_lengths({"x": x, "y": y, "sample_weight": weights}, len(own))
    if compared and not getattr(source, "in_order", False):
        what = f"gather of {type(source).__name__}"
        row_check.refuse_other_rows(gather, own, (x, y, weights), what)
    weights = padding.checked_weights(weights, len(own), class_weight, y)
    x, y, weights = padding.padded((x, y, weights), end - begin)
    present = padding.presence(len(own), end - begin)
    return batch.sampled_batch(x, y, weights, present, mark, begin)
