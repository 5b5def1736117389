"""One plan on a `BudgetAccount`: what it says of it, and which plans are refused."""

import dataclasses
import datetime
from decimal import Decimal
from typing import Any

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.core import PrivacyError

_ROUNDING = 1e-6  # one plan's epsilon differs by less, relatively, between two processors


@dataclasses.dataclass(frozen=True)
class Charge:
    """One plan on the account.

    Attributes:
        run_id: The plan's.
        epsilon: Its whole budget's ε.
        delta: Its whole budget's δ.
        note: What the user says of it.
        charged: When, an ISO date and time in UTC.
        draw: The name of the prepared draw that its run reads; empty if it draws by itself.
    """

    run_id: str
    epsilon: float
    delta: float
    note: str
    charged: str
    draw: str = ""


def charge_of(plan: PrivacyPlan, note: str) -> Charge:
    """That of a calibrated plan, now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    budget = plan.budget
    return Charge(plan.run_id, budget.epsilon, budget.delta, str(note), now, _draw_of(plan))


def refuse_without_epsilon(plan: Any) -> None:
    """Raises ValueError for what is no calibrated plan, or one of `not_private_plan`."""
    if not isinstance(plan, PrivacyPlan) or plan.plan_id is None:
        raise ValueError(f"Expected a calibrated plan, got {plan!r}: use plan.calibrate().")
    if plan.sampling.not_private_seed is not None:
        raise ValueError(
            "Expected a plan with an epsilon, got one of not_private_plan: there is nothing to "
            "charge, and nothing of its run may be released."
        )


def refuse_shared(plan: PrivacyPlan) -> None:
    """Raises PrivacyError for a plan on a draw that several runs share."""
    if not plan.sampling.composes:
        raise PrivacyError(
            "Expected a plan whose run draws its batches by itself, got one on a draw that other "
            "runs share: together they may cost several times the sum of their budgets. Prepare "
            "batches for each run, without shared=True."
        )


def refuse_dearer(plan: PrivacyPlan) -> None:
    """Raises PrivacyError for a plan that spends more than its budget says."""
    spent = plan.spent(plan.sampling.steps).epsilon
    if spent > plan.budget.epsilon * (1 + _ROUNDING):
        raise PrivacyError(
            f"Expected a plan that spends at most its budget, epsilon={plan.budget.epsilon:g}, got "
            f"one whose {plan.sampling.steps} steps spend epsilon={spent:g}: its noise or its "
            "sampling was changed by hand. Use calibrate(), or with_noise(...)."
        )


def refuse_same_draw(charges: list[Charge], plan: PrivacyPlan) -> None:
    """Raises PrivacyError if a charged plan reads the draw of this one, or a copy of it."""
    draw = _draw_of(plan)
    if draw and draw in [charge.draw for charge in charges]:
        raise PrivacyError(
            f"Expected a plan whose run draws its batches by itself, got one on the draw "
            f"{draw[:12]}, on which a charged plan trains: the two see the same batches, and may "
            "cost several times the sum of their budgets. Prepare batches for each run."
        )


def refuse_second_run(charges: list[Charge], plan: PrivacyPlan, resumed: bool) -> None:
    """Raises PrivacyError if a charged plan may begin a run again."""
    if not resumed:
        when = next(charge.charged for charge in charges if charge.run_id == plan.run_id)
        raise PrivacyError(
            f"Expected a plan that no other process has charged, got one that was charged {when}: "
            "it pays for one run. For a second one use plan.calibrate(); if this process goes on "
            "with that run, from its checkpoint, use charge(plan, resumed=True)."
        )


def is_charged(plan: PrivacyPlan, charges: list[Charge]) -> bool:
    """Whether the plan is among the charges, with the budget that it has."""
    own = [charge for charge in charges if charge.run_id == plan.run_id]
    for charge in own:
        if (charge.epsilon, charge.delta) != (plan.budget.epsilon, plan.budget.delta):
            raise PrivacyError(
                f"Expected the plan that was charged, of epsilon={charge.epsilon:g} and delta="
                f"{charge.delta:g}, got one of the same name with epsilon={plan.budget.epsilon:g} "
                f"and delta={plan.budget.delta:g}: calibrate() makes a plan with a name of its own."
            )
    return bool(own)


def left(budget: PrivacyBudget, charges: list[Charge]) -> tuple[float, float]:
    """ε and δ that are left, of the decimal numbers that users write: 0.1 three times is 0.3."""
    pairs = (
        (budget.epsilon, [charge.epsilon for charge in charges]),
        (budget.delta, [charge.delta for charge in charges]),
    )
    rests = [Decimal(repr(whole)) - sum(Decimal(repr(p)) for p in parts) for whole, parts in pairs]
    return float(rests[0]), float(rests[1])


def _draw_of(plan: PrivacyPlan) -> str:
    return str(getattr(plan.sampling, "draw_id", ""))
