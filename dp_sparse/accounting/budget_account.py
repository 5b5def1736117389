"""What all plans on one dataset spend together, in a file beside the data.

Anyone who trains again on the same data spends again. The account adds up the budgets of all plans
and refuses a plan beyond its own budget.

A `Charge` is one plan on the account. Plans that cannot be charged are refused by reason.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import math
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.core import PrivacyError, StateFile

_ROUNDING = 1e-6  # one plan's epsilon differs by less, relatively, between two processors
_FORMAT = "dp_sparse-budget-account-2"
_CHARGED_HERE: set[tuple[int, Path, str]] = set()  # by this process: its id, the file, the plan


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


def _charge(name: str, plan: PrivacyPlan, note: str) -> Charge:
    """That of a plan's budget, now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    budget = plan.budget
    return Charge(name, budget.epsilon, budget.delta, str(note), now, _draw_of(plan))


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


def reject_over_budget(plan: PrivacyPlan) -> None:
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


class BudgetAccount:
    """Adds up what every plan on one dataset may spend, and refuses plans beyond its budget.

    Call `charge(plan)` before training with it. Several processes may use one file. A hidden file
    beside it, `.NAME.lock`, keeps the number of charges, so that an account which was lost or set
    back to an earlier state is refused; copy and move both.

    Args:
        path: The file, beside the data, local. It is made if it does not exist, in a folder that
            does. A symbolic link stands for the file that it names.
        budget: What all plans together may spend. Needed for a new file; of another one it must be
            what the file says.

    Raises:
        ValueError: A folder that does not exist, a new file without `budget`, another budget than
            the file's, or a file that is no account, or has lost charges.

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
    run to draw its batches by itself, so plans on a shared draw, and two plans on one draw, are
    refused. A plan counts whole, whether or not its run ends early. A charge is on the disk before
    `charge` returns. What is trained without a charge is not covered, nor a second run under a plan
    that was charged once (`resumed=True` says that there is none). Anyone who restores an earlier
    state of both files, or works on a copy of them, is not found. The file tells nothing of the
    data.
    """

    def __init__(self, path: str | os.PathLike[str], budget: PrivacyBudget | None = None) -> None:
        self._path = Path(path).resolve()  # a link would be replaced by a file of its own
        if not self._path.parent.is_dir():
            raise ValueError(
                f"Expected a file in a folder that exists, got path={str(path)!r}: make "
                f"{self._path.parent} first."
            )
        if budget is not None and math.isinf(budget.epsilon):
            raise ValueError(f"Expected a budget of finite epsilon, got {budget}.")
        self._file = StateFile(self._path, "Restore it: without it, what was spent is not known.")
        with self._locked() as noted:
            if not self._path.exists() and not _number_in(noted):
                if budget is None:
                    raise ValueError(
                        f"Expected budget=PrivacyBudget(epsilon, delta) for a new account, got "
                        f"none, and there is no file {self._path}."
                    )
                self._write(budget, None, [])
            own = self._read_whole(noted)[0]
        if budget is not None and budget != own:
            raise ValueError(
                f"Expected the budget of {self._path}, {own}, got budget={budget}: leave it out. "
                "A larger one after the fact is a decision about the data: make a new account of "
                "what was spent so far."
            )

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def budget(self) -> PrivacyBudget:
        """What all plans together may spend."""
        return self._read()[0]

    @property
    def charges(self) -> list[Charge]:
        """The plans so far, in the order in which they were charged."""
        return self._read()[2]

    def reserve(self, plan: PrivacyPlan, name: str, note: str = "") -> None:
        """Charges a plan's budget before it is calibrated, for what is released before training.

        Args:
            plan: With the budget and the sampling of the plan to come.
            name: Of the reservation, which `charge(plan, reserved=name)` turns into the plan's
                charge; a second reservation of this name is free.
            note: As in `charge`.

        Raises:
            ValueError: As `charge`.
            PrivacyError: The budget is beyond what is left.
        """
        with self._locked() as noted:
            budget, relation, charges = self._read_whole(noted)
            if name in [charge.run_id for charge in charges]:
                return
            self._refuse_other(relation, plan)
            self._refuse_beyond(budget, charges, plan.budget)
            charges = [*charges, _charge(name, plan, note)]
            self._write(budget, plan.sampling.neighbouring, charges)
            _write_number(noted, len(charges))

    def charge(
        self, plan: PrivacyPlan, note: str = "", *, resumed: bool = False, reserved: str = ""
    ) -> PrivacyBudget | None:
        """Adds a plan's whole budget; one that this process has charged already is free.

        Args:
            plan: A calibrated plan.
            note: What to remember it by; it must not tell of the data.
            resumed: Whether this process goes on with the run of the plan, from its checkpoint, if
                an earlier process charged it: then that is free, too. A plan pays for one run.
            reserved: The name of a reservation, which the charge replaces.

        Returns:
            What is left, or None if nothing is: neither ε nor δ may be 0 in a plan.

        Raises:
            ValueError: A plan without noise, of `not_private_plan`, or with another neighbouring
                relation than earlier ones; or the account has lost charges.
            PrivacyError: The plan is beyond what is left, spends more than its budget says, trains
                on a shared draw of batches or on that of a charged plan, has the name of a charged
                one and another budget, or was charged by another process and is not `resumed`;
                nothing is charged.
        """
        refuse_without_epsilon(plan)
        refuse_shared(plan)
        reject_over_budget(plan)
        here = os.getpid(), self._path, plan.run_id
        with self._locked() as noted:
            budget, relation, charges = self._read_whole(noted)
            if is_charged(plan, charges):
                refuse_second_run(charges, plan, resumed or here in _CHARGED_HERE)
            else:
                others = [charge for charge in charges if charge.run_id != reserved]
                self._refuse_other(relation, plan)
                refuse_same_draw(others, plan)
                self._refuse_beyond(budget, others, plan.budget)
                charges = [*others, _charge(plan.run_id, plan, note)]
                self._write(budget, plan.sampling.neighbouring, charges)
                _write_number(noted, len(charges))
            _CHARGED_HERE.add(here)
        epsilon, delta = left(budget, charges)
        return PrivacyBudget(epsilon, delta) if epsilon > 0 and delta > 0 else None

    def __str__(self) -> str:
        budget, _, charges = self._read()
        epsilon, delta = left(budget, charges)
        lines = [
            f"{self._path}: epsilon={epsilon:g} and delta={delta:g} are left of "
            f"epsilon={budget.epsilon:g} and delta={budget.delta:g}; plans so far: {len(charges)}."
        ]
        lines += [
            f"{c.charged}  epsilon={c.epsilon:g}  delta={c.delta:g}  {c.run_id[:8]}  {c.note}"
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
        epsilon, delta = left(budget, charges)
        if wanted.epsilon <= epsilon and wanted.delta <= delta:
            return
        raise PrivacyError(
            f"Expected a plan within what is left, epsilon={epsilon:g} and delta={delta:g} of "
            f"epsilon={budget.epsilon:g} and delta={budget.delta:g}, got one of "
            f"epsilon={wanted.epsilon:g} and delta={wanted.delta:g}: earlier plans in "
            f"{self._path} have the rest. Calibrate one for less, or train no more on this data."
        )

    def _read_whole(self, noted: IO[str]) -> tuple[PrivacyBudget, str | None, list[Charge]]:
        """What the file says, unless it has fewer charges than were made; under the lock."""
        number = _number_in(noted)
        found = self._read() if self._path.exists() else None
        if found is None or len(found[2]) < number:
            raise ValueError(
                f"Expected an account of at least {number} charges in {self._path}, got "
                f"{'no file' if found is None else f'one of {len(found[2])}'}: it was lost or set "
                f"back, and what was spent is not known. Restore the newest one; if it was of "
                f"other data, remove {noted.name}."
            )
        return found

    def _read(self) -> tuple[PrivacyBudget, str | None, list[Charge]]:
        return self._file.read(_parsed)

    def _write(self, budget: PrivacyBudget, relation: str | None, charges: list[Charge]) -> None:
        described: dict[str, Any] = {
            "format": _FORMAT,
            "budget": dataclasses.asdict(budget),
            "neighbouring": relation,
            "charges": [dataclasses.asdict(charge) for charge in charges],
        }
        self._file.write(described)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        """One process at a time, by a lock on a file beside it, which stays, and has the number."""
        with self._path.with_name(f".{self._path.name}.lock").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def _parsed(found: Any) -> tuple[PrivacyBudget, str | None, list[Charge]]:
    if found["format"] != _FORMAT:
        raise KeyError("format")
    charges = [Charge(**charge) for charge in found["charges"]]
    return PrivacyBudget(**found["budget"]), found["neighbouring"], charges


def _number_in(noted: IO[str]) -> int:
    """How many charges there were, as far as the file beside the account knows."""
    noted.seek(0)
    return max((int(line) for line in noted.read().split() if line.isdigit()), default=0)


def _write_number(noted: IO[str], charges: int) -> None:
    """Appends it, after the account is on the disk: a crash in between leaves a smaller number."""
    noted.write(f"{charges}\n")
    noted.flush()
    os.fsync(noted.fileno())
