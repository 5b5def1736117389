"""What else trained a model's weights in this process: other plans, and training without privacy.

A statement speaks of one plan. Whoever reads it must learn what else counts. That belongs to the
variables and not to the model, since layers are shared, taken over into new models and compiled
again. Every optimizer of Keras that is built on variables is kept in mind, by its count of steps.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import keras

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.optimizers.base import PrivateOptimizer


class _Training(NamedTuple):
    """One optimizer: its plan if it has one, its count of steps, and what it trains."""

    plan: PrivacyPlan | None
    steps: keras.Variable
    variables: list[weakref.ref[keras.Variable]]


_KNOWN: list[_Training] = []
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
        remember(self)

    build._dp_sparse_original = original  # type: ignore[attr-defined]
    owner.build = build


def remember(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps in mind what a built optimizer trains, until those variables are gone."""
    private = isinstance(optimizer, PrivateOptimizer)
    own = _Training(
        optimizer.plan if private else None,
        optimizer.steps_spent if private else optimizer._iterations,  # also of accumulated ones
        [weakref.ref(variable) for variable in optimizer._trainable_variables],
    )
    # A private one stands for what it wraps, whose parts were built just before.
    replaced = set(map(id, optimizer.variables)) if private else {id(own.steps)}
    with _CHANGING:
        others = [each for each in _KNOWN if id(each.steps) not in replaced]
        _KNOWN[:] = [each for each in others if any(ref() is not None for ref in each.variables)]
        _KNOWN.append(own)


def known_noise(model: keras.Model) -> bool:
    """Whether a run of `not_private_plan`, whose noise anybody can take away, trained a weight."""
    return any(each.plan is not None and _is_public(each.plan) for each in _of(model.variables))


def with_earlier_training(
    statement: str, model: keras.Model, counted: Collection[str | None]
) -> str:
    """What else trained the model adds to a statement, a line for each, and the statement.

    Args:
        statement: Of the plans that it counts.
        model: The model.
        counted: Their plan_ids.
    """
    unprotected, runs = False, dict[str | None, tuple[PrivacyPlan, int]]()
    for each in _of(model.variables):
        if each.plan is None or (_is_public(each.plan) and each.plan.plan_id not in counted):
            unprotected = True
        elif each.plan.plan_id not in counted:
            plan, steps = each.plan, int(each.steps.numpy())
            runs[plan.plan_id] = plan, max(steps, runs.get(plan.plan_id, (plan, 0))[1])
    lines = [_WITHOUT_PRIVACY] if unprotected else []
    lines += [_sentence(plan, steps) for plan, steps in runs.values()]
    return "\n".join([*lines, statement])


_WITHOUT_PRIVACY = (
    "These weights were also trained without privacy. What is said below does not hold for "
    "whoever was in the data of that training."
)


def _of(variables: Sequence[keras.Variable]) -> list[_Training]:
    """What took steps on one of the variables."""
    wanted = set(map(id, variables))
    with _CHANGING:
        known = [each for each in _KNOWN if any(id(ref()) in wanted for ref in each.variables)]
    return [each for each in known if int(each.steps.numpy())]


def _is_public(plan: PrivacyPlan) -> bool:
    return plan.sampling.not_private_seed is not None


def _sentence(plan: PrivacyPlan, steps: int) -> str:
    spent = plan.spent(steps)
    return (
        f"These weights were also trained for {steps} steps of another plan: epsilon="
        f"{spent.epsilon:.4g} and delta={spent.delta:.4g}. For whoever was in its data, too, they "
        "add to those below."
    )
