"""Which plan each random draw of batches belongs to, in this process.

Plans whose ε are added up must each draw their own batches: two that train on the same random
batches reveal more about their examples than the two ε add up to. A draw is a pass over a sampler,
or all batches that were prepared before training. Batches of a stream are not drawn.
"""

import tensorflow as tf

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import PrivacyError, fingerprint, replicas, require
from dp_sparse.sampling import SEEDED, Marker

_PLANS: dict[str, int] = {}  # the number of a plan, from 1 on, by run_id
_OWNERS: list[tf.lookup.experimental.MutableHashTable] = []  # one: number of a plan by draw

_ALONE = "the epsilons of two plans add up only if each plan draws its own batches"
_OF_A_PASS = (
    "Expected batches that this plan alone trains on, got batch {} of a pass that another plan has "
    f"begun: {_ALONE}. Read plan.sampling.batches(dataset) anew for each plan, and do not cache it."
)
_OF_A_PREPARED_DRAW = (
    "Expected prepared batches that this plan alone trains on, got batch {} of a draw on which "
    f"another plan has trained: {_ALONE}. Continue with the plan of that run, prepare again, or "
    "use offline_sampling(..., shared=True), whose statement says so."
)


class Passes:
    """Those of one plan. Not thread-safe to make: `StepLedger` does it under its lock."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._number = _PLANS.setdefault(plan.run_id, len(_PLANS) + 1)
        if not _OWNERS:
            _OWNERS.append(replicas.undistributed(_empty))
        self._owners = _OWNERS[0]
        draw_id = getattr(plan.sampling, "draw_id", "")
        self._prepared = _key_of(draw_id) if draw_id else None
        drawn = self._prepared is not None or plan.sampling.steps_per_pass is None
        self._owned = drawn and plan.sampling.composes

    def check(self, marker: Marker) -> list[tf.Operation]:
        """Fails for a batch of a draw that another plan has begun; not if a seed made it."""
        if not self._owned:
            return []
        owner = self._owners.lookup(self._draw(marker))
        own = tf.equal(owner, 0) | tf.equal(owner, self._number) | tf.equal(marker.nonce, SEEDED)
        why = _OF_A_PASS if self._prepared is None else _OF_A_PREPARED_DRAW
        return [require(own, PrivacyError, why, marker.position)]

    def take(self, marker: Marker) -> list[tf.Operation]:
        """The draw of this batch belongs to this plan from now on."""
        if not self._owned:
            return []
        number = tf.constant(self._number, tf.int64)
        return [self._owners.insert(self._draw(marker), number)]

    def _draw(self, marker: Marker) -> tf.Tensor:
        return marker.nonce if self._prepared is None else tf.constant(self._prepared, tf.int64)


def _key_of(draw_id: str) -> int:
    """A negative number: nonces, which are times, are not."""
    return -1 - fingerprint({"draw_id": draw_id})


def _empty() -> tf.lookup.experimental.MutableHashTable:
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)
