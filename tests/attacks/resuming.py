"""Runs that go on with another plan, fewer steps spent, or noise that was used before."""

import contextlib
import copy
import pathlib
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from dp_sparse.optimizers import ledger
from tests.attacks.counting import CLIP, EXAMPLES, Counter, linear, poisson
from tests.attacks.entries import REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.measuring import attacking
from tests.attacks.ways import WAYS, Way
from tests.training_cases import plan_for

LOUD, QUIET = 3.0, 0.6  # noise multipliers of the stated plan and of the one that trained
SPENT, STEPS = 2, 4
_APART = tuple(way for way in WAYS if way != "graph")


def plan(noise_multiplier: float, steps: int = STEPS) -> dp_sparse.PrivacyPlan:
    return plan_for(EXAMPLES, steps=steps, noise_multiplier=noise_multiplier)


def spent_by(counter: Counter, steps: int = SPENT) -> Counter:
    counter.fit(counter.batches(), steps_per_epoch=steps)
    return counter


def built(way: Way, its_plan: dp_sparse.PrivacyPlan) -> Counter:
    counter = Counter.on(way, its_plan)
    counter.model.optimizer.build(counter.model.trainable_variables)
    return counter


Carry = Callable[[Counter, Counter, pathlib.Path], Any]


def by_checkpoint(old: Counter, new: Counter, folder: pathlib.Path) -> None:
    path = tf.train.Checkpoint(model=old.model, optimizer=old.model.optimizer).write(
        str(folder / "c")
    )
    checkpoint = tf.train.Checkpoint(model=new.model, optimizer=new.model.optimizer)
    checkpoint.read(path).expect_partial()


def by_checkpoint_of_the_model(old: Counter, new: Counter, folder: pathlib.Path) -> None:
    """Keras' models track their optimizers."""
    path = tf.train.Checkpoint(old.model).write(str(folder / "c"))
    tf.train.Checkpoint(new.model).read(path).expect_partial()


def by_state_tree(old: Counter, new: Counter, folder: pathlib.Path) -> None:
    new.model.set_state_tree(old.model.get_state_tree(value_format="numpy_array"))


def by_optimizer_values(old: Counter, new: Counter, folder: pathlib.Path) -> None:
    new.model.set_weights(old.model.get_weights())
    values = [np.array(v) for v in old.model.optimizer.variables]
    if hasattr(new.model.optimizer, "set_weights"):
        new.model.optimizer.set_weights(values)
    for variable, value in zip(new.model.optimizer.variables, values, strict=True):
        variable.assign(value)


def by_weights_file(old: Counter, new: Counter, folder: pathlib.Path) -> None:
    old.model.save_weights(folder / "m.weights.h5")
    new.model.load_weights(folder / "m.weights.h5")


def by_own_store(old: Counter, new: Counter, folder: pathlib.Path) -> None:
    store: dict[str, Any] = {}
    old.model.optimizer.save_own_variables(store)
    new.model.set_weights(old.model.get_weights())
    new.model.optimizer.load_own_variables(store)


def of_another_plan(carry: Carry) -> Callable[[Way], float]:
    """What a quiet plan trained is carried into a loud plan's model, and training goes on."""

    def attack(way: Way) -> float:
        old, new = spent_by(built(way, plan(QUIET))), built(way, plan(LOUD))
        with tempfile.TemporaryDirectory() as folder, attacking():
            carry(old, new, pathlib.Path(folder))
        with attacking(new.model):
            new.fit(new.batches(), steps_per_epoch=1)
        return LOUD / QUIET  # of the noise that the statement names, what was really there

    return attack


def of_the_same_plan(carry: Carry) -> Callable[[Way], float]:
    """The same in a process that has forgotten the steps: those that were saved must count."""

    def attack(way: Way) -> float:
        old = spent_by(built(way, poisson(STEPS)))
        with tempfile.TemporaryDirectory() as folder, forgotten():
            new = built(way, old.plan)
            with attacking():
                carry(old, new, pathlib.Path(folder))
            return further_steps(new) / STEPS

    return attack


def saved_amid_steps(way: Way) -> float:
    """A step that another thread takes while weights are saved: the file counts fewer."""
    counter = spent_by(built(way, poisson(STEPS)))
    layer = counter.model.layers[-1]
    save = layer.save_own_variables

    def after_a_step(store: Any) -> None:
        counter.fit(counter.batches(), steps_per_epoch=1)
        save(store)

    layer.save_own_variables = after_a_step
    with tempfile.TemporaryDirectory() as folder, attacking():
        counter.model.save_weights(pathlib.Path(folder) / "m.weights.h5")
    return np.inf


class forgotten:
    """A new process: the ledger has counted nothing."""

    def __enter__(self) -> None:
        self._kept = dict(ledger._SPENT), dict(ledger._LAST)
        ledger._SPENT.clear()
        ledger._LAST.clear()

    def __exit__(self, *_: Any) -> None:
        for own, kept in zip((ledger._SPENT, ledger._LAST), self._kept, strict=True):
            own.clear()
            own.update(kept)


def further_steps(counter: Counter) -> float:
    """Trains as long as it may; how often an example was used in all."""
    with contextlib.suppress(dp_sparse.PrivacyError):
        for _ in range(2):
            counter.fit(counter.batches(), steps_per_epoch=STEPS)
    return float(np.abs(counter.terms).max())


def set_back(change: Callable[[Counter], Any]) -> Callable[[Way], float]:
    """Something is set back in mid-run, and training goes on as long as it may."""

    def attack(way: Way) -> float:
        counter = spent_by(built(way, poisson(STEPS)))
        with attacking(counter.model):
            change(counter)
        return further_steps(counter) / STEPS

    return attack


def copied(make: Callable[[Any], Any]) -> Callable[[Way], float]:
    """A copy of the optimizer trains another model on: the steps of both are counted together."""

    def attack(way: Way) -> float:
        counter = spent_by(built(way, poisson(STEPS)))
        with attacking(counter.model):
            optimizer = make(counter.model.optimizer)
            model = keras.models.clone_model(counter.model)
            model.set_weights(counter.model.get_weights())
            model.compile(optimizer, loss=linear)
        return further_steps(Counter(optimizer.plan, model)) / STEPS

    return attack


def noise_of(counter: Counter) -> np.ndarray:
    """What a step of an all-padding batch adds: noise alone."""
    before = counter.model.get_weights()[0]
    counter.fit(counter.batches(), steps_per_epoch=1)
    return counter.model.get_weights()[0] - before


def replayed(again: Callable[[Counter, pathlib.Path], Counter]) -> Callable[[Way], float]:
    """A step is taken twice from the same saved state; equal noise would subtract away."""

    def attack(way: Way) -> float:
        counter = built(way, plan(LOUD))
        with tempfile.TemporaryDirectory() as folder, attacking():
            back = again(counter, pathlib.Path(folder))
            first, second = noise_of(counter), noise_of(back)
        return (
            np.inf
            if np.allclose(first, second, rtol=0, atol=1e-3 * CLIP * LOUD / EXAMPLES)
            else 0.0
        )

    return attack


def after_restoring(counter: Counter, folder: pathlib.Path) -> Counter:
    """In the same object: `first` is drawn before, so the state is set back within."""
    path = tf.train.Checkpoint(model=counter.model).write(str(folder / "c"))
    noise_of(counter)
    tf.train.Checkpoint(model=counter.model).read(path)
    return counter


def after_loading(counter: Counter, folder: pathlib.Path) -> Counter:
    counter.model.save(folder / "m.keras")
    model = keras.models.load_model(folder / "m.keras", custom_objects={"linear": linear})
    return Counter(model.optimizer.plan, model)


def after_cloning(make: Callable[[Any], Any]) -> Callable[[Counter, pathlib.Path], Counter]:
    def again(counter: Counter, folder: pathlib.Path) -> Counter:
        model = keras.models.clone_model(counter.model)
        model.set_weights(counter.model.get_weights())
        model.compile(make(counter.model.optimizer), loss=linear)
        return Counter(counter.plan, model)

    return again


def from_config(optimizer: Any) -> Any:
    return type(optimizer).from_config(optimizer.get_config())


COPIES = {
    "deepcopy": copy.deepcopy,
    "from_config": from_config,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "serialised by Keras": lambda optimizer: keras.optimizers.deserialize(
        keras.optimizers.serialize(optimizer)
    ),
    "of a copied plan": lambda optimizer: dp_sparse.DPSGDOptimizer(
        keras.optimizers.SGD(1.0), copy.deepcopy(optimizer.plan), CLIP
    ),
}
CARRIES: dict[str, Carry] = {
    "tf.train.Checkpoint": by_checkpoint,
    "tf.train.Checkpoint of the model": by_checkpoint_of_the_model,
    "set_state_tree": by_state_tree,
    "the optimizer's variables": by_optimizer_values,
    "load_weights": by_weights_file,
    "load_own_variables": by_own_store,
}
BACK = {
    "steps_spent assigned 0": lambda c: c.model.optimizer.steps_spent.assign(0),
    "iterations assigned 0": lambda c: c.model.optimizer.iterations.assign(0),
    "a new optimizer of the plan": lambda c: c.model.compile(
        dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), c.plan, CLIP), loss=linear
    ),
    "compiled again": lambda c: c.model.compile(c.model.optimizer, loss=linear),
    "steps_spent below 0": lambda c: c.model.optimizer.steps_spent.assign(-100),
}

ENTRIES = (
    [
        Entry(
            f"another plan by {name}",
            of_another_plan(carry),
            REFUSED.matching("plan|spent steps"),
            apart=_APART,
        )
        for name, carry in CARRIES.items()
    ]
    + [
        Entry(
            f"a new process by {name}", of_the_same_plan(carry), REFUSED_OR_MEASURED, apart=_APART
        )
        for name, carry in CARRIES.items()
    ]
    + [
        Entry(f"set back: {name}", set_back(change), REFUSED_OR_MEASURED, apart=_APART)
        for name, change in BACK.items()
    ]
    + [
        Entry(
            "saved amid steps",
            saved_amid_steps,
            REFUSED.matching("Steps were taken"),
            apart=_APART,
        )
    ]
    + [
        Entry(f"a copy by {name}", copied(make), REFUSED_OR_MEASURED, apart=_APART)
        for name, make in COPIES.items()
    ]
    + [
        Entry(f"noise after {name}", replayed(again), REFUSED_OR_MEASURED, apart=_APART, noisy=True)
        for name, again in [
            ("restoring", after_restoring),
            ("loading", after_loading),
            *(
                (f"a copy by {name}", after_cloning(COPIES[name]))
                for name in ("deepcopy", "pickle")
            ),
        ]
    ]
)
