"""Whether held-out examples are those that a sampler was given: no ε covers metrics of these.

Arrays are the same where they share memory, and datasets where one is made of the other. Copies are
not recognised, and one value that is broadcast to all examples tells nothing.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_TRAINED_ON: weakref.WeakKeyDictionary[tf.data.Dataset, Any] = weakref.WeakKeyDictionary()
_MOST_WORK = 10_000  # to tell whether two views of one array meet


def remember(batches: tf.data.Dataset, source: Any) -> tf.data.Dataset:
    """The same batches, whose `source` is remembered: a nest of arrays, or a dataset."""
    _TRAINED_ON[batches] = source
    return batches


def trained_on(batches: tf.data.Dataset, held_out: Any) -> bool:
    """Whether a part of `held_out`, arrays or a dataset, is what `batches` are drawn from."""
    sources = [_TRAINED_ON[each] for each in _made_of(batches) if each in _TRAINED_ON]
    if isinstance(held_out, tf.data.Dataset):
        parts = {id(each) for each in _made_of(held_out)}
        return any(id(source) in parts for source in sources)
    own = [leaf for s in sources if not isinstance(s, tf.data.Dataset) for leaf in _arrays(s)]
    return any(_meet(leaf, other) for leaf in _arrays(held_out) for other in own)


def numbers_of_examples(batches: tf.data.Dataset) -> set[int]:
    """How many examples there are in what `batches` are drawn from, as far as it is known."""
    sources = [_TRAINED_ON[each] for each in _made_of(batches) if each in _TRAINED_ON]
    datasets = {int(s.cardinality()) for s in sources if isinstance(s, tf.data.Dataset)}
    arrays = (_arrays(s) for s in sources if not isinstance(s, tf.data.Dataset))
    return datasets | {len(leaf) for leaves in arrays for leaf in leaves if leaf.ndim}


def _made_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for each in dataset._inputs():
        yield from _made_of(each)


def _arrays(nest: Any) -> list[np.ndarray]:
    leaves = (leaf for leaf in tf.nest.flatten(nest) if hasattr(leaf, "__array__"))
    return [array for array in map(np.asarray, leaves) if array.size and any(array.strides)]


def _meet(one: np.ndarray, other: np.ndarray) -> bool:
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False
