"""The ways by which a user trains, and one step of a problem on each of them."""

import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution
from dp_sparse.distribution import multi_worker
from dp_sparse.sampling import new_nonce
from tests.attacks.measuring import (
    SIGMA,
    Problem,
    Released,
    attacking,
    contributions_kept,
    hidden_state,
    private_optimizer,
    sensitivity,
    too_late,
    without,
    zeroed,
)
from tests.training_cases import marked_dataset, plan_for

STEPS = 100


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        compiled: Arguments of `compile`.
        optimizer: Arguments of the private optimizer.
        replicas: Of a `MirroredStrategy`; 1 is none.
        examples: How many of a problem's examples make a batch; by default all.
        loop: Fit on forced batches of a Poisson plan ("fit"), fit on a stream ("stream") or
            `distribution.train` on a stream ("train").
        seen: Whether a spy can see the contribution map.
    """

    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    replicas: int = 1
    examples: int | None = None
    loop: str = "fit"
    seen: bool = True


WAYS: dict[str, Way] = {
    "graph": Way(),
    "eager": Way({"run_eagerly": True}),
    "xla": Way({"jit_compile": True}, seen=False),
    "microbatches": Way(optimizer={"microbatch_size": 2}),
    "mirrored": Way(replicas=2),
    "stream": Way(loop="stream"),
    "train": Way(loop="train", replicas=2),
    # A batch, a part or a share of one example:
    "one": Way(examples=1),
    "one_eager": Way({"run_eagerly": True}, examples=1),
    "one_xla": Way({"jit_compile": True}, examples=1, seen=False),
    "one_a_part": Way(optimizer={"microbatch_size": 1}),
    "one_a_replica": Way(replicas=2, examples=2),
    "one_of_a_stream": Way(loop="stream", examples=1),
    "one_by_train": Way(loop="train", examples=1),
    "one_a_replica_by_train": Way(loop="train", replicas=2, examples=2),
}
ONES = tuple(name for name in WAYS if name.startswith("one"))
BATCHES_OF_ONE = tuple(name for name, way in WAYS.items() if way.examples == 1)
SEVERAL = tuple(name for name, way in WAYS.items() if way.replicas > 1)


class Trainee:
    """A model compiled for a way, and its steps; weights are set back after each.

    Attributes:
        model: The model, compiled.
        plan: Its plan, of 100 steps.
        data: `(x, y)` or `(x, y, weights)`, as many examples as the way takes.
        removable: Places of those that make neighbours.
    """

    def __init__(self, problem: Problem, way: Way) -> None:
        self.problem, self.way = problem, way
        self.data, self.removable = _data(problem, way.examples)
        size = len(tf.nest.flatten(self.data)[0])
        self.plan = plan_for(size, steps=STEPS, noise_multiplier=problem.sigma, capacity=size)
        if way.loop != "fit":
            self.plan = stream_plan(size, size, STEPS, problem.sigma)
        with strategy_of(way.replicas).scope():
            keras.utils.set_random_seed(7)
            self.model = problem.model()
            self.optimizer = private_optimizer(problem, self.plan, **way.optimizer)
            settings = {**problem.compiled, **way.compiled}
            loss = problem.loss() if isinstance(problem.loss, type) else problem.loss
            self.model.compile(self.optimizer, loss=loss, **settings)
        self._seen: dict[int, float] = {}
        self._first = [np.array(v) for v in self.model.variables]

    def on(self, removed: int | None = None) -> Released:
        """One step on the data, or on the neighbour without one example."""
        self.optimizer.use_noise_key(tf.constant([123, 456], tf.int64))  # for equal masks
        if self.optimizer.built and getattr(self.optimizer, "window", 1) > 1:
            self.optimizer._begin_first()
        before = self._trained()
        self._seen.clear()
        with contributions_kept(self._seen) if self.way.seen else contextlib.nullcontext():
            self._step(removed)
        after = self._trained()
        scale = self.plan.sampling.expected_batch_size
        state = hidden_state(self.model, self.problem.state(self.model))
        self._set_back()
        return Released((before - after) * scale, state, dict(self._seen))

    def _step(self, removed: int | None) -> None:
        if self.way.loop == "train":
            # Its workers would agree on a key of their own, and so on other masks.
            with mock.patch.object(multi_worker, "_shared_secrets", _known_secrets):
                distribution.train(self.model, self._source(removed), steps_per_epoch=1)
        else:
            self.model.fit(self._batches(removed), steps_per_epoch=1, verbose=0)

    def _batches(self, removed: int | None) -> tf.data.Dataset:
        if self.way.loop != "fit":
            spent = int(self.optimizer.steps_spent.numpy())
            batches = self.plan.sampling.batches(self._source(removed), first_step=spent)
            return batches.take(1)  # of several in one execution Keras would take all
        data = self.data if removed is None else without(self.data, removed)
        x, y, *weights = data
        present = np.ones(len(tf.nest.flatten(x)[0]), np.float32)
        present[len(present) - (removed is not None) :] = 0
        return marked_dataset(
            self.plan, x, y, present=present, weights=weights[0] if weights else None
        )

    def _source(self, removed: int | None) -> tf.data.Dataset:
        x, y, *weights = self.data
        ones = np.ones(len(tf.nest.flatten(x)[0]), np.float32)
        data = x, y, weights[0] if weights else ones
        return tf.data.Dataset.from_tensor_slices(
            data if removed is None else zeroed(data, removed)
        )

    def _trained(self) -> np.ndarray:
        parts = [np.array(v, np.float64).ravel() for v in self.model.trainable_variables]
        return np.concatenate(parts)

    def _set_back(self) -> None:
        for variable, value in zip(self.model.variables, self._first, strict=True):
            variable.assign(value)


def _data(problem: Problem, examples: int | None) -> tuple[Any, list[int]]:
    """A problem's data, and the places of the examples that it removes.

    Where only some of the examples are taken, these are among them. All keep their order: removing
    the last one must not move another one, which would get another mask.
    """
    data = tf.nest.map_structure(np.asarray, problem.data())
    size = len(tf.nest.flatten(data)[0])
    removed = list(dict.fromkeys(index % size for index in problem.removed))
    if examples is None:
        return data, removed
    others = [index for index in range(size) if index not in removed]
    kept = sorted([*removed, *others][:examples])
    places = [kept.index(index) for index in removed if index in kept]
    return tf.nest.map_structure(lambda leaf: leaf[kept], data), places


def _known_secrets(*_: Any) -> tuple[int, int]:
    return secrets.randbits(128), new_nonce(None)


def measured(problem: Problem) -> Callable[[Way], float]:
    """The sensitivity of a problem on a way, over the neighbours that it names."""

    def attack(way: Way) -> float:
        with attacking():
            trainee = Trainee(problem, way)
        with attacking(trainee.model, kept=lambda: problem.state(trainee.model)):
            whole = trainee.on()
        with too_late():
            return sensitivity(whole, [trainee.on(index) for index in trainee.removable])

    return attack


def measured_after(problem: Problem, tame: Callable[[Any], Any]) -> Callable[[Way], float]:
    """As `measured`, but the run begins with batches in which no example stands out.

    Args:
        problem: What is trained, on a batch in which one does.
        tame: Makes such a batch out of the problem's.
    """

    def attack(way: Way) -> float:
        with attacking():
            trainee = Trainee(problem, way)
        with attacking(trainee.model, kept=lambda: problem.state(trainee.model)):
            wild, trainee.data = trainee.data, tame(trainee.data)
            for _ in range(4):  # one more than are looked at
                trainee.on()
            trainee.data = wild
            whole = trainee.on()
        with too_late():
            return sensitivity(whole, [trainee.on(index) for index in trainee.removable])

    return attack


def stream_plan(
    num_examples: int, batch_size: int, passes: int, sigma: float = SIGMA
) -> dp_sparse.PrivacyPlan:
    """An uncalibrated plan for a stream."""
    sampling = dp_sparse.StreamSampling(num_examples, batch_size, passes)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(epsilon=1.0, delta=1e-5), sampling)
    return dataclasses.replace(plan, noise_multiplier=sigma, plan_id=secrets.token_hex(16))


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """TensorFlow's own collectives cannot serve several strategies in one process."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    devices = [f"CPU:{i}" for i in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
