"""Which plan each pass over a sampler belongs to, in this process.

Plans whose ε are added up must draw their batches each by itself: two that train on the same random
batches learn more of whoever is in them than both say together.
"""

import tensorflow as tf

from dp_sparse.core import PrivacyError, replicas, require
from dp_sparse.sampling import SEEDED, Marker

_PLANS: dict[str, int] = {}  # the number of a plan, from 1 on, by plan_id
_OWNERS: list[tf.lookup.experimental.MutableHashTable] = []  # one: number of a plan by nonce


class Passes:
    """Those of one plan. Not thread-safe to make: `StepLedger` does it under its lock."""

    def __init__(self, plan_id: str) -> None:
        self._number = _PLANS.setdefault(plan_id, len(_PLANS) + 1)
        if not _OWNERS:
            _OWNERS.append(replicas.undistributed(_empty))
        self._owners = _OWNERS[0]

    def check(self, marker: Marker) -> tf.Operation:
        """Fails for a batch of a pass that another plan has begun; not if a seed made it."""
        owner = self._owners.lookup(marker.nonce)
        return require(
            tf.equal(owner, 0) | tf.equal(owner, self._number) | tf.equal(marker.nonce, SEEDED),
            PrivacyError,
            "Expected batches that this plan alone trains on, got batch {} of a pass that another "
            "plan has begun: the epsilons of two plans add up only if each draws its batches by "
            "itself. Read plan.sampling.batches(dataset) anew for each plan, and do not cache it.",
            marker.position,
        )

    def take(self, marker: Marker) -> tf.Operation:
        """The pass of this batch belongs to this plan from now on."""
        return self._owners.insert(marker.nonce, tf.constant(self._number, tf.int64))


def _empty() -> tf.lookup.experimental.MutableHashTable:
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)
