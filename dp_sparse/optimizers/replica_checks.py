"""Whether all replicas of a step decide alike.

By the same key, plan, step, clip norm, settings, and survivors of a window.
"""

from typing import Any

import tensorflow as tf

from dp_sparse.core import PrivacyError, require

_FIXES = {
    "noise key": (
        "their noise would be averaged away: train with dp_sparse.distribution.train, which shares "
        "one."
    ),
    "plan": "give each worker the same plan.",
    "number of steps spent": "load the same checkpoint on all workers, or on none.",
    "clip norm": "load the same checkpoint on all workers, or on none.",
    "set of optimizer settings": "give each worker's optimizer the same arguments.",
    "window": "load the same checkpoint on all workers, or on none.",
}
_COLUMNS = (3, 1, 3, 1, 1, 1)  # of each


def what_decides(
    key: tf.Tensor,
    plan: tf.Tensor,
    spent: tf.Tensor,
    clip_norm: tf.Tensor,
    settings: tf.Tensor,
    choice: tf.Tensor,
) -> tf.Tensor:
    """All that decides a step beside its batch, int64 `[1, 10]`.

    `key` is int64 `[1, 3]` and `spent` int64 `[3]`.
    """
    rest = tf.concat([[plan], spent, [clip_norm, settings, choice]], 0)
    return tf.concat([key, rest[tf.newaxis]], 1)


def checks(deciding: tf.Tensor) -> list[tf.Operation]:
    """Operations that fail unless all rows of `deciding`, int64 `[replicas, 10]`, are equal."""
    alike = tf.reduce_all(tf.equal(deciding, deciding[:1]), axis=0)
    return [
        require(
            tf.reduce_all(same),
            PrivacyError,
            f"Expected all workers with one {name}, got several: {fix}",
        )
        for same, (name, fix) in zip(tf.split(alike, _COLUMNS), _FIXES.items(), strict=True)
    ]


def nameless(config: Any) -> Any:
    """A config without the names that Keras numbers as it makes things."""
    if isinstance(config, dict):
        return {key: nameless(value) for key, value in config.items() if key != "name"}
    return [nameless(value) for value in config] if isinstance(config, list | tuple) else config
