"""What all plans on one dataset spend together, in a file beside the data.

Whoever trains again on the same data spends again. The account adds up the budgets of all plans
and refuses a plan beyond its own budget.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.core import PrivacyError, whole_file

_FORMAT = "dp_sparse-budget-account-1"
_ROUNDING = 1e-6  # one plan's epsilon differs by less, relatively, between two processors


@dataclasses.dataclass(frozen=True)
class Charge:
    """One plan on the account.

    Attributes:
        plan_id: The name of its calibration.
        epsilon: Its whole budget's ε.
        delta: Its whole budget's δ.
        note: What the user says of it.
        charged: When, an ISO date and time in UTC.
    """

    plan_id: str
    epsilon: float
    delta: float
    note: str
    charged: str


class BudgetAccount:
    """Adds up what every plan on one dataset may spend, and refuses plans beyond its budget.

    Call `charge(plan)` before training with it. Several processes may use one file.

    Args:
        path: The file, beside the data. It is made if it does not exist, in a folder that does.
        budget: What all plans together may spend. Needed for a new file; of another one it must be
            what the file says.

    Raises:
        ValueError: A folder that does not exist, a new file without `budget`, another budget than
            the file's, or a file that is no account.

    Examples:
        >>> import dp_sparse, tempfile
        >>> path = f"{tempfile.mkdtemp()}/clicks.budget.json"
        >>> account = dp_sparse.BudgetAccount(path, dp_sparse.PrivacyBudget(2.0, 1e-5))
        >>> budget = dp_sparse.PrivacyBudget(epsilon=1.5, delta=1e-6)
        >>> sampling = dp_sparse.PoissonSampling(10_000, expected_batch_size=1000, epochs=1)
        >>> plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
        >>> account.charge(plan, note="Monday")
        PrivacyBudget(epsilon=0.5, delta=9e-06)
        >>> account.charge(plan.calibrate(), note="Tuesday")
        Traceback (most recent call last):
            ...
        dp_sparse.core.errors.PrivacyError: Expected a plan within what is left, epsilon=0.5 ...

    ### Formal Guarantees
    All charged runs together are (ε, δ)-differentially private for the account's budget, by basic
    composition, under the neighbouring relation of their plans, which must be one and the same.
    Basic composition stays true where a plan is chosen after earlier results were seen, since the
    sum is bounded in advance: it is a privacy filter (Rogers et al., NeurIPS 2016). It needs each
    run to draw its batches by itself, so plans on a shared draw are refused. A plan counts whole,
    whether or not its run ends early. What is trained without a charge is not covered. The
    file tells nothing of the data.
    """

    def __init__(self, path: str | os.PathLike[str], budget: PrivacyBudget | None = None) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise ValueError(
                f"Expected a file in a folder that exists, got path={str(path)!r}: make "
                f"{self._path.parent} first."
            )
        if budget is not None and math.isinf(budget.epsilon):
            raise ValueError(f"Expected a budget of finite epsilon, got {budget}.")
        with self._locked():
            if not self._path.exists():
                if budget is None:
                    raise ValueError(
                        f"Expected budget=PrivacyBudget(epsilon, delta) for a new account, got "
                        f"none, and there is no file {self._path}."
                    )
                self._write(budget, None, [])
            own = self._read()[0]
        if budget is not None and budget != own:
            raise ValueError(
                f"Expected the budget of {self._path}, {own}, got budget={budget}: leave it out. "
                "A larger one after the fact is a decision about the data: make a new account of "
                "what was spent so far."
            )

    @property
    def budget(self) -> PrivacyBudget:
        """What all plans together may spend."""
        return self._read()[0]

    @property
    def charges(self) -> list[Charge]:
        """The plans so far, in the order in which they were charged."""
        return self._read()[2]

    def charge(self, plan: PrivacyPlan, note: str = "") -> PrivacyBudget | None:
        """Adds a plan's whole budget; a plan that is there already, as of a resumed run, is free.

        Args:
            plan: A calibrated plan.
            note: What to remember it by; it must not tell of the data.

        Returns:
            What is left, or None if nothing is: neither ε nor δ may be 0 in a plan.

        Raises:
            ValueError: A plan without noise, of `not_private_plan`, or with another neighbouring
                relation than earlier ones.
            PrivacyError: The plan is beyond what is left, spends more than its budget says, trains
                on a shared draw of batches, or has the name of a charged one and another budget;
                nothing is charged.
        """
        if not isinstance(plan, PrivacyPlan) or plan.plan_id is None:
            raise ValueError(f"Expected a calibrated plan, got {plan!r}: use plan.calibrate().")
        if plan.sampling.not_private_seed is not None:
            raise ValueError(
                "Expected a plan with an epsilon, got one of not_private_plan: there is nothing to "
                "charge, and nothing of its run may be released."
            )
        _refuse_shared(plan)
        _refuse_dearer(plan)
        with self._locked():
            budget, relation, charges = self._read()
            if not _is_charged(plan, charges):
                self._refuse_other(relation, plan)
                self._refuse_beyond(budget, charges, plan.budget)
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                new = Charge(plan.plan_id, plan.budget.epsilon, plan.budget.delta, str(note), now)
                charges = [*charges, new]
                self._write(budget, plan.sampling.neighbouring, charges)
        epsilon, delta = _left(budget, charges)
        return PrivacyBudget(epsilon, delta) if epsilon > 0 and delta > 0 else None

    def __str__(self) -> str:
        budget, _, charges = self._read()
        epsilon, delta = _left(budget, charges)
        lines = [
            f"{self._path}: epsilon={epsilon:g} and delta={delta:g} are left of "
            f"epsilon={budget.epsilon:g} and delta={budget.delta:g}; plans so far: {len(charges)}."
        ]
        lines += [
            f"{c.charged}  epsilon={c.epsilon:g}  delta={c.delta:g}  {c.plan_id[:8]}  {c.note}"
            for c in charges
        ]
        return "\n".join(lines)

    def _refuse_other(self, relation: str | None, plan: PrivacyPlan) -> None:
        own = plan.sampling.neighbouring
        if relation not in (None, own):
            raise ValueError(
                f"Expected a plan for which of two neighbouring datasets {relation}, as for the "
                f"plans in {self._path}, got one for which {own}: budgets of different relations "
                "do not add up. Use one kind of sampling, or an account for each."
            )

    def _refuse_beyond(
        self, budget: PrivacyBudget, charges: list[Charge], wanted: PrivacyBudget
    ) -> None:
        epsilon, delta = _left(budget, charges)
        if wanted.epsilon <= epsilon and wanted.delta <= delta:
            return
        raise PrivacyError(
            f"Expected a plan within what is left, epsilon={epsilon:g} and delta={delta:g} of "
            f"epsilon={budget.epsilon:g} and delta={budget.delta:g}, got one of "
            f"epsilon={wanted.epsilon:g} and delta={wanted.delta:g}: earlier plans in "
            f"{self._path} have the rest. Calibrate one for less, or train no more on this data."
        )

    def _read(self) -> tuple[PrivacyBudget, str | None, list[Charge]]:
        try:
            found = json.loads(self._path.read_text())
            if found["format"] != _FORMAT:
                raise KeyError("format")
            charges = [Charge(**charge) for charge in found["charges"]]
            return PrivacyBudget(**found["budget"]), found["neighbouring"], charges
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"Expected a budget account, got {self._path}, which cannot be read as one "
                f"({type(error).__name__}: {error}). Restore it: without it, what was spent is not "
                "known."
            ) from error

    def _write(self, budget: PrivacyBudget, relation: str | None, charges: list[Charge]) -> None:
        described: dict[str, Any] = {
            "format": _FORMAT,
            "budget": dataclasses.asdict(budget),
            "neighbouring": relation,
            "charges": [dataclasses.asdict(charge) for charge in charges],
        }
        with whole_file(self._path) as file:
            file.write((json.dumps(described, indent=1) + "\n").encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time, by a lock on a file beside it, which stays."""
        with self._path.with_name(f".{self._path.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _refuse_shared(plan: PrivacyPlan) -> None:
    if not plan.sampling.composes:
        raise PrivacyError(
            "Expected a plan whose run draws its batches by itself, got one on a draw that other "
            "runs share: together they may cost several times the sum of their budgets. Prepare "
            "batches for each run, without shared=True."
        )


def _refuse_dearer(plan: PrivacyPlan) -> None:
    spent = plan.spent(plan.sampling.steps).epsilon
    if spent > plan.budget.epsilon * (1 + _ROUNDING):
        raise PrivacyError(
            f"Expected a plan that spends at most its budget, epsilon={plan.budget.epsilon:g}, got "
            f"one whose {plan.sampling.steps} steps spend epsilon={spent:g}: its noise or its "
            "sampling was changed by hand. Use calibrate(), or with_noise(...)."
        )


def _is_charged(plan: PrivacyPlan, charges: list[Charge]) -> bool:
    """Whether the plan is among the charges, with the budget that it has."""
    own = [charge for charge in charges if charge.plan_id == plan.plan_id]
    for charge in own:
        if (charge.epsilon, charge.delta) != (plan.budget.epsilon, plan.budget.delta):
            raise PrivacyError(
                f"Expected the plan that was charged, of epsilon={charge.epsilon:g} and delta="
                f"{charge.delta:g}, got one of the same name with epsilon={plan.budget.epsilon:g} "
                f"and delta={plan.budget.delta:g}: calibrate() makes a plan with a name of its own."
            )
    return bool(own)


def _left(budget: PrivacyBudget, charges: list[Charge]) -> tuple[float, float]:
    """ε and δ that are left, of the decimal numbers that users write: 0.1 three times is 0.3."""
    pairs = (
        (budget.epsilon, [charge.epsilon for charge in charges]),
        (budget.delta, [charge.delta for charge in charges]),
    )
    rests = [Decimal(repr(whole)) - sum(Decimal(repr(p)) for p in parts) for whole, parts in pairs]
    return float(rests[0]), float(rests[1])
