"""Plans under which a model's weights were trained before its present one, in this process.

A statement speaks of one plan. Where a model goes on under another, whoever reads it must learn
that the first one counts, too.
"""

import weakref
from collections.abc import Collection

import keras

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.optimizers.base import PrivateOptimizer

_Runs = dict[str, tuple[PrivacyPlan, int]]  # a plan and its steps, by plan_id
_EARLIER: "weakref.WeakKeyDictionary[keras.Model, _Runs]" = weakref.WeakKeyDictionary()


def remember_plan(model: keras.Model) -> None:
    """Keeps the plan of the model's optimizer, if it has trained; called by `compile`."""
    before = getattr(model, "optimizer", None)
    if not isinstance(before, PrivateOptimizer):
        return
    plan, steps = before.plan, before.plan.sampling.steps - before.steps_left
    if steps:
        assert plan.plan_id is not None  # no step without one
        _EARLIER.setdefault(model, {})[plan.plan_id] = plan, steps


def with_earlier_plans(statement: str, model: keras.Model, counted: Collection[str | None]) -> str:
    """What earlier plans of the model add to a statement, a line for each, and the statement.

    Args:
        statement: Of the plans that it counts.
        model: The model.
        counted: Their plan_ids.
    """
    runs = _EARLIER.get(model, {})
    others = [run for plan_id, run in runs.items() if plan_id not in counted]
    return "\n".join([*(_sentence(plan, steps) for plan, steps in others), statement])


def _sentence(plan: PrivacyPlan, steps: int) -> str:
    spent = plan.spent(steps)
    return (
        f"These weights were trained before, for {steps} steps of another plan: epsilon="
        f"{spent.epsilon:.4g} and delta={spent.delta:.4g}. For whoever was in its data, too, they "
        "add to those below."
    )
