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
) -> bool:
    """Predicts some examples again beside others; returns whether there were two or more.

    Args:
        model: The model.
        predict: What it predicts of examples, `[n, ...]`.
        x: A nest of arrays `[n, ...]`, of which 128 are taken at random.

    Raises:
        PrivacyError: A prediction changed.
    """
    rng = np.random.default_rng()
    all_of_them = tf.nest.map_structure(np.asarray, x)
    total = len(tf.nest.flatten(all_of_them)[0])
    chosen = rng.permutation(total)[:_EXAMPLES]
    own = tf.nest.map_structure(lambda leaf: leaf[chosen], all_of_them)
    count = len(chosen)
    if count < 2:
        return False
    present, first = np.ones(count, np.float32), predict(own)
    places = rebatching.order(present, seed=int(rng.integers(2**31)))
    others = [*rebatching.of_the_data(places, present, False, 1.0, (True, False))]
    floats = tf.nest.map_structure(lambda leaf: leaf.dtype.kind == "f", own)
    if any(tf.nest.flatten(floats)):
        takes_nan = not clipping.lets_nan_through(model)
        others += rebatching.of_other_values(places, present, takes_nan)
    for other in others:
        found = _predicted(predict, rebatching.taken(own, floats, other))
        if found is not None and _differ(first[other.places], found, other):
            seen = f" ({other.seen})" if other.seen else ""
            raise PrivacyError(_MIXED.format(model.name, seen))
    _refuse_mixed_integers(model, predict, own, all_of_them, first)
    return True


def _predicted(predict: Callable[[Any], np.ndarray], x: Any) -> np.ndarray | None:
    """The predictions; None if the model asserts something of its inputs."""
    try:
        return predict(x)
    except tf.errors.InvalidArgumentError:
        return None


def _refuse_mixed_integers(
    model: keras.Model,
    predict: Callable[[Any], np.ndarray],
    own: Any,
    all_of_them: Any,
    first: np.ndarray,
) -> None:
    """Half of the examples hold the least or the largest integers of the data; text stays."""
    other = rebatching.half_kept(len(first), "once the integers of others are extreme")
    for extreme in (np.min, np.max):

        def replaced(leaf: np.ndarray, data: np.ndarray, extreme: Any = extreme) -> np.ndarray:
            made = leaf.copy()
            if leaf.dtype.kind in "iub" and data.size:
                made[other.replaced] = extreme(data)
            return made

        found = _predicted(predict, tf.nest.map_structure(replaced, own, all_of_them))
        if found is not None and _differ(first, found, other):
            raise PrivacyError(_MIXED.format(model.name, f" ({other.seen})"))


def _differ(before: np.ndarray, after: np.ndarray, other: rebatching.Rebatching) -> bool:
    before, after = (part[other.compared].reshape(-1) for part in (before, after))
    scale = np.max(np.abs(before), initial=0.0, where=np.isfinite(before))
    near = np.isclose(before, after, rtol=0, atol=other.tolerance * scale, equal_nan=True)
    return int(np.count_nonzero(~near)) >= min(other.least, before.size)
