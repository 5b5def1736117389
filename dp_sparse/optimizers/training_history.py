"""What else trained a model's weights in this process: other plans, and training without privacy.

A statement speaks of one plan. Anyone who reads it must learn what else counts. That belongs to the
variables and not to the model, since layers are shared, taken over into new models and compiled
again. Every optimizer of Keras that is built on variables is kept in mind, by its count of steps.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from dp_sparse.accounting import PrivacyPlan, rounded_up
from dp_sparse.optimizers.base import PrivateOptimizer

_WITHOUT_PRIVACY = (
    "These weights were also trained without privacy. What is said below does not hold for the "
    "data of that training."
)


class _Training(NamedTuple):
    """One optimizer: its plan if it has one, its count of steps, and what it trains."""

    plan: PrivacyPlan | None
    steps: keras.Variable
    variables: list[weakref.ref[tf.Variable]]


class Calibrated(NamedTuple):
    """What a variable that was made from a release rests on.

    Attributes:
        release_id: The name of this release; another draw has another one.
        paid_by: The run of the plan that pays for the release; None if it has a budget of its own.
        statement: What it cost apart from a plan; empty if one pays.
    """

    release_id: str
    paid_by: str | None
    statement: str


_KNOWN: list[_Training] = []
_CALIBRATED: list[tuple[weakref.ref[tf.Variable], Calibrated]] = []
_CHANGING = threading.Lock()


def install_build_hook() -> None:
    """Wraps the `build` that all optimizers of Keras inherit, once."""
    owner = next(cls for cls in keras.optimizers.Optimizer.__mro__ if "build" in vars(cls))
    original: Callable[..., None] = owner.build
    if hasattr(original, "_dp_sparse_original"):
        return

    @functools.wraps(original)
    def build(self: keras.optimizers.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        record(self)

    build._dp_sparse_original = original  # type: ignore[attr-defined]
    owner.build = build


def record(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps in mind what a built optimizer trains, until those variables are gone."""
    private = isinstance(optimizer, PrivateOptimizer)
    own = _Training(
        optimizer.plan if private else None,
        # Of a stock one not `iterations`, which is no variable where gradients are accumulated.
        optimizer.steps_spent if private else optimizer._iterations,
        [weakref.ref(_of_tensorflow(variable)) for variable in optimizer._trainable_variables],
    )
    # A private one stands for what it wraps, unless that has trained by itself.
    parts = set(map(id, optimizer.variables)) if private else set()
    with _CHANGING:
        others = [
            each
            for each in _KNOWN
            if each.steps is not own.steps
            and any(ref() is not None for ref in each.variables)
            and (id(each.steps) not in parts or int(each.steps.numpy()))
        ]
        _KNOWN[:] = [*others, own]


def known_noise(model: keras.Model) -> bool:
    """Whether a run of `not_private_plan`, whose noise anybody can take away, trained a weight."""
    found = _that_trained(model.variables)
    return any(each.plan is not None and _is_public(each.plan) for each in found)


def take_over(pairs: Sequence[tuple[keras.Variable, keras.Variable]]) -> None:
    """Gives variables the history of those whose values they got: pairs of old and new."""
    new_of = {id(_of_tensorflow(old)): _of_tensorflow(new) for old, new in pairs}
    with _CHANGING:
        for each in _KNOWN:
            own = [new_of[id(ref())] for ref in each.variables if id(ref()) in new_of]
            each.variables.extend(map(weakref.ref, own))
        made = [(new_of[id(ref())], own) for ref, own in _CALIBRATED if id(ref()) in new_of]
        _CALIBRATED.extend((weakref.ref(variable), own) for variable, own in made)


def note_calibration(variables: Sequence[keras.Variable], made_from: Calibrated) -> None:
    """Keeps in mind which release variables were made from, until they are gone."""
    with _CHANGING:
        there = [each for each in _CALIBRATED if each[0]() is not None]
        own = [(weakref.ref(_of_tensorflow(variable)), made_from) for variable in variables]
        _CALIBRATED[:] = [*there, *own]


def calibrations_of(variables: Sequence[keras.Variable]) -> list[Calibrated]:
    """The releases that some of the variables were made from, each once."""
    wanted = {id(_of_tensorflow(variable)) for variable in variables}
    with _CHANGING:
        return list(dict.fromkeys(made for ref, made in _CALIBRATED if id(ref()) in wanted))


def with_other_training(
    statement: str, variables: Sequence[keras.Variable], counted: Collection[str]
) -> str:
    """What else trained the variables adds to a statement, a line for each, and the statement.

    Args:
        statement: Of the plans that it counts.
        variables: All that the statement is to hold for.
        counted: Their `run_id`s.
    """
    found = [(each.plan, int(each.steps.numpy())) for each in _that_trained(variables)]
    others = [(plan, steps) for plan, steps in found if plan is None or plan.run_id not in counted]
    by_steps = sorted(others, key=lambda other: other[1])  # the last of a plan has its most steps
    most = {plan.run_id if plan else None: (plan, steps) for plan, steps in by_steps}
    lines = dict.fromkeys(_sentence(plan, steps) for plan, steps in most.values())
    return "\n".join([*lines, statement])


def _that_trained(variables: Sequence[keras.Variable]) -> list[_Training]:
    """What took steps on one of the variables."""
    wanted = {id(_of_tensorflow(variable)) for variable in variables}
    with _CHANGING:
        known = [each for each in _KNOWN if any(id(ref()) in wanted for ref in each.variables)]
    return [each for each in known if int(each.steps.numpy())]


def _of_tensorflow(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """TensorFlow's own, which a loop of the user's may hold, and of all replicas together."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    container = getattr(value, "_distributed_container", lambda: None)()
    return value if container is None else container


def _is_public(plan: PrivacyPlan) -> bool:
    """Whether anybody can take its noise away."""
    return plan.sampling.not_private_seed is not None


def _sentence(plan: PrivacyPlan | None, steps: int) -> str:
    if plan is None or _is_public(plan):
        return _WITHOUT_PRIVACY
    try:
        guaranteed = plan.guaranteed(steps)
    except ValueError:  # too little noise for any epsilon at its delta
        return _WITHOUT_PRIVACY
    return (
        f"These weights were also trained under another plan, for {steps} of its "
        f"{plan.sampling.steps} steps: epsilon={rounded_up(guaranteed.epsilon, 4)} and "
        f"delta={rounded_up(guaranteed.delta, 3)}. For the data of both runs, they add to "
        "those below."
    )
