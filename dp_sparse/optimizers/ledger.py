"""Which step a batch may be, and whether the plan still has one: the counter behind the budget.

The count belongs to the plan, not to an optimizer: all optimizers of one plan in a process share
it, so neither a clone nor a second model gets steps of its own. A saved optimizer carries its
count; whichever is larger holds. A seal ties that count to its plan: whatever restores the one
without the other, or under another plan, is noticed before a step is spent.

Which plan each random draw of batches belongs to, in this process.

Plans whose ε are added up must each draw their own batches: two that train on the same random
batches reveal more about their examples than the two ε add up to. A draw is a pass over a sampler,
or all batches that were prepared before training. Batches of a stream are not drawn.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import NoStepsLeftError, PrivacyError, fingerprint, replicas, require
from dp_sparse.optimizers import batch_order
from dp_sparse.sampling import OWN_ORDER, SEEDED, Marker, new_nonce

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
# Nonces are times: batches that an earlier process left on a disk are older than this one, and
# those of this process are newer, also if the clock is set back meanwhile.
_IMPORTED = new_nonce(None)
_SPENT: dict[str, tf.Variable] = {}  # by run_id; untracked, so no checkpoint can set them back
_LAST: dict[str, tf.Variable] = {}  # nonce and position of the last batch, by run_id
_MAKING = threading.Lock()  # held while a ledger is made: two threads may make the first of a plan
_NUMBER = np.array([0, 0, 0, 1])  # picks the number of an example out of its marker
_SPREAD = 0x1E3779B9  # odd, so that no two counts of steps change a fingerprint alike
_OF_ANOTHER_PLAN = (
    "Expected an optimizer whose steps were spent under its plan, but it was given {} steps spent "
    "under another plan, whose noise or sampling differs, or was restored in part (its steps_spent "
    "and steps_seal go together): this plan's statement would not hold for them. Compile with the "
    "plan of the saved run, and restore the whole optimizer."
)


class PassOwners:
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


@dataclasses.dataclass(frozen=True)
class SavedCount:
    """What an optimizer saves of a ledger: int64 scalars.

    Attributes:
        steps: Steps spent.
        seal: `seal_of` those steps and their plan.
        own_order: 1 if the last step's examples followed from its position, else 0.
    """

    steps: keras.Variable
    seal: keras.Variable
    own_order: keras.Variable

    def write(self, plan: PrivacyPlan, steps: Any, own_order: Any) -> None:
        """Sets all of it."""
        steps = tf.cast(steps, tf.int64)
        self.steps.value.assign(steps)
        self.seal.value.assign(seal_of(plan, steps))
        self.own_order.value.assign(tf.cast(own_order, tf.int64))

    def void(self) -> None:
        """Makes it fit no plan, so that no step follows until all of it was restored."""
        self.steps.assign(max(1, int(self.steps.numpy())))
        self.seal.assign(-1)

    def values(self) -> tuple[int, int]:
        """The steps and whether the last one's examples followed from its position."""
        return int(self.steps.numpy()), int(self.own_order.numpy())

    def words(self) -> tf.Tensor:
        """All of it, int64 `[3]`."""
        of = self.steps, self.seal, self.own_order
        return tf.stack([tf.cast(variable.value, tf.int64) for variable in of])

    def fits(self, plan: PrivacyPlan) -> tf.Tensor:
        """Whether the steps were spent under `plan`, or under one that guarantees the same."""
        steps, seal = (tf.convert_to_tensor(v.value) for v in (self.steps, self.seal))
        return tf.equal(steps, 0) | tf.equal(seal, seal_of(plan, steps))

    def check(self, plan: PrivacyPlan) -> tf.Operation:
        """Fails unless it fits."""
        steps = tf.convert_to_tensor(self.steps.value)
        return require(self.fits(plan), PrivacyError, _OF_ANOTHER_PLAN, steps)


def seal_of(plan: PrivacyPlan, steps: tf.Tensor) -> tf.Tensor:
    """A fingerprint of the plan's guarantee and of a count of steps below 2³⁴, int64."""
    of_plan = tf.constant(plan.fingerprint, tf.int64)
    return tf.bitwise.bitwise_xor(of_plan, tf.cast(steps, tf.int64) * _SPREAD)


def _counters() -> list[tf.Variable]:
    """No step spent, and no batch but those that an earlier process left."""
    start = [np.int64(0), np.array([_IMPORTED, -1])]
    return [tf.Variable(value, trainable=False) for value in start]


class StepLedger:
    """Counts the steps of one plan and refuses those it did not pay for."""

    def __init__(self, plan: PrivacyPlan) -> None:
        assert plan.plan_id is not None
        self._plan, run = plan, plan.run_id
        with _MAKING:
            if run not in _SPENT:
                _SPENT[run], _LAST[run] = replicas.undistributed(_counters)
            self._spent, self._last = _SPENT[run], _LAST[run]
            self._passes = PassOwners(plan)
        with tf.init_scope():  # one lock for all plans: two may ask for one pass at once
            self._section = tf.CriticalSection(shared_name="dp_sparse_steps")
        self._draws = plan.sampling.steps_per_pass is None

    def spend(self, marker: tf.Tensor, saved: SavedCount) -> tf.Tensor:
        """Checks one batch and counts its step; the update must wait for the returned count.

        Args:
            marker: The batch's marker, int64 `[capacity, 4]`.
            saved: The optimizer's own count, brought up to date.
        """
        fields = Marker(*tf.unstack(marker[0, :-1], 3))
        with tf.control_dependencies([self._same_sampler(fields), saved.check(self._plan)]):
            whole = self._whole(marker)

        def counted() -> tf.Tensor:
            progress = self._course(saved)
            step = progress.spent if self._draws else fields.position
            with tf.control_dependencies([*self._checks(fields, progress), whole]):
                last, after = tf.stack([fields.nonce, fields.position]), step + 1
                written = [
                    self._last.assign(last, read_value=False),
                    self._spent.assign(after, read_value=False),
                    *self._passes.take(fields),
                ]
            with tf.control_dependencies(written):
                return tf.identity(after)

        after = self._section.execute(counted)  # no other thread reads in between
        with tf.control_dependencies([after]):  # a refused batch changes nothing
            saved.write(self._plan, after, tf.equal(fields.nonce, OWN_ORDER))
        return after

    def steps_left(self, saved: SavedCount) -> int:
        """Steps that the plan still has, by the larger count."""
        spent = max(int(self._spent.numpy()), saved.values()[0])
        return max(0, self._plan.sampling.steps - spent)

    def _course(self, saved: SavedCount) -> batch_order.Progress:
        """What this process and the optimizer's own count say together: the larger count holds."""
        spent, (nonce, position) = self._spent.read_value(), tf.unstack(self._last.read_value(), 2)
        steps, own_order = map(tf.convert_to_tensor, (saved.steps.value, saved.own_order.value))
        own = tf.equal(nonce, OWN_ORDER) | (steps > spent)
        own &= tf.equal(own_order, 1) | (steps < spent)
        return batch_order.Progress(tf.maximum(spent, steps), nonce, position, own)

    def _same_sampler(self, marker: Marker) -> tf.Operation:
        return require(
            tf.equal(marker.fingerprint, self._plan.sampling.fingerprint),
            PrivacyError,
            "Expected a batch of this plan's sampler, got one of another sampler: "
            "use fit(plan.sampling.batches(dataset)).",
        )

    def _whole(self, marker: tf.Tensor) -> tf.Operation:
        """Every place of one batch, each once: examples of another one were not drawn with it."""
        capacity, size = self._plan.sampling.batch_capacity, tf.shape(marker, tf.int64)[0]
        numbers = tf.range(size)[:, tf.newaxis] * _NUMBER
        whole = tf.reduce_all(tf.equal(marker, marker[0] * (1 - _NUMBER) + numbers))
        return require(
            tf.equal(size, capacity) & whole,
            PrivacyError,
            f"Expected the {capacity} examples of one batch as its sampler made it, got {{}}, "
            "or some of several batches: do not unbatch, shuffle, batch or filter the sampler's "
            "batches; with several replicas train with fit, not train_on_batch.",
            size,
        )

    def _checks(self, marker: Marker, progress: batch_order.Progress) -> list[tf.Operation]:
        steps = self._plan.sampling.steps
        repeats_itself = self._plan.sampling.not_private_seed is not None
        secret = require(
            tf.not_equal(marker.nonce, SEEDED) | repeats_itself,
            PrivacyError,
            "Expected batches under a secret key, got batches made with a seed: use batches() "
            "without seed.",
        )
        left = require(
            progress.spent < steps,
            NoStepsLeftError,
            f"The plan has no steps left: {{}} of {steps} are spent. "
            "Stop here; a resumed run takes steps_per_epoch= what is left of the plan, and a "
            "longer one a plan calibrated for more steps.",
            progress.spent,
        )
        return [secret, *self._in_turn(marker, progress), left]

    def _in_turn(self, marker: Marker, progress: batch_order.Progress) -> list[tf.Operation]:
        sampling = self._plan.sampling
        if sampling.steps_per_pass is None:
            return [*batch_order.drawn_in_order(marker, progress), *self._passes.check(marker)]
        in_turn = batch_order.stream_in_order(
            marker, progress, sampling.steps_per_pass, sampling.steps
        )
        return [*in_turn, *self._passes.check(marker)]


def refuse_unfit(
    plan: PrivacyPlan, name: str, variables: Sequence[keras.Variable], store: Mapping[str, Any]
) -> None:
    """Raises PrivacyError unless `store`, by number, has the variables of a run of `plan`."""
    if len(store.keys()) != len(variables):
        raise PrivacyError(
            f"Expected {len(variables)} saved variables of {name}, got {len(store.keys())}: the "
            "spent steps would be lost. Compile the model as the saved one was, or, to take the "
            "weights alone, call load_weights before compile."
        )
    saved = {v.name: store[str(i)] for i, v in enumerate(variables)}
    steps, seal = (int(np.asarray(saved[name])) for name in ("steps_spent", "steps_seal"))
    if steps and seal != int(seal_of(plan, steps)):
        raise PrivacyError(
            f"The saved optimizer spent {steps} steps under another plan, whose noise or "
            "sampling differs: this plan's statement would not hold for them. Compile with the "
            "plan of the saved run."
        )
