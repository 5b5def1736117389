"""Whether a model predicts each example by itself, also where training did not look.

Layers may do something else when they predict than when they train, so what training checked says
nothing of predictions. A few examples are predicted again beside others, as `rebatching` has them.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse import clipping
from dp_sparse.core import PrivacyError
from dp_sparse.guards import rebatching

_EXAMPLES = 128
_MIXED = (
    "The prediction of {} for one example depends on another example that is predicted with it{}, "
    "so a count of predictions would not be that of single examples.\n"
    "Remove what mixes examples when the model predicts, such as statistics of the batch."
)


def refuse_mixed_predictions(
    model: keras.Model, predict: Callable[[Any], np.ndarray], x: Any
) -> None:
    """Predicts some examples again beside others.

    Args:
        model: The model.
        predict: What it predicts of examples, `[n, ...]`.
        x: A nest of arrays `[n, ...]`, of which the first 128 are taken.

    Raises:
        PrivacyError: A prediction changed.
    """
    own = tf.nest.map_structure(lambda leaf: np.asarray(leaf)[:_EXAMPLES], x)
    leaves = tf.nest.flatten(own)
    count = len(leaves[0])
    if count < 2:
        return
    present, first = np.ones(count, np.float32), predict(own)
    places = rebatching.order(present, seed=int(np.random.default_rng().integers(2**31)))
    alterable = tf.nest.map_structure(lambda leaf: leaf.dtype.kind == "f", own)
    others = [*rebatching.of_the_data(places, present, False, 1.0, (True, False))]
    if any(tf.nest.flatten(alterable)):
        takes_nan = not clipping.lets_nan_through(model)
        others += rebatching.of_other_values(places, present, takes_nan)
    for other in others:
        try:
            found = predict(rebatching.taken(own, alterable, other))
        except tf.errors.InvalidArgumentError:
            continue  # the model asserts something of its inputs
        if _differ(first[other.places], found, other):
            seen = f" ({other.seen})" if other.seen else ""
            raise PrivacyError(_MIXED.format(model.name, seen))


def _differ(before: np.ndarray, after: np.ndarray, other: rebatching.Rebatching) -> bool:
    before, after = (part[other.compared].reshape(-1) for part in (before, after))
    scale = np.max(np.abs(before), initial=0.0, where=np.isfinite(before))
    near = np.isclose(before, after, rtol=0, atol=other.tolerance * scale, equal_nan=True)
    return int(np.count_nonzero(~near)) >= min(other.least, before.size)
