"""What several plans on disjoint parts of a data set guarantee together: the largest of them.

Training day by day has one plan for each period of time: its own N, q, T and σ, and the histogram
of its examples as a release. An example is in one period, so it pays that period's plan; what other
periods compute of it is post-processing. ε is the largest at one δ, not the sum.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.accounting.statement import rounded_up


@dataclasses.dataclass(frozen=True)
class DisjointPlans:
    """Plans that train one model, each on a part of the data that no other one has.

    Attributes:
        plans: Calibrated plans by the names of their parts, in the order of training.

    Raises:
        ValueError: No plan, one that is not calibrated, one twice, or plans of different δ or with
            different neighbouring relations.

    Examples:
        >>> import dp_sparse
        >>> budget = dp_sparse.PrivacyBudget(epsilon=1.0, delta=1e-4)
        >>> plans = dp_sparse.DisjointPlans({
        ...     day: dp_sparse.PrivacyPlan(
        ...         budget, dp_sparse.PoissonSampling(1000, 100, steps=steps)).calibrate()
        ...     for day, steps in [("Monday", 10), ("Tuesday", 20)]})
        >>> print(f"{plans.spent().epsilon:.2f}, {plans.spent({'Monday': 5}).epsilon:.2f}")
        1.00, 0.76
        >>> print(f"{plans.guaranteed({'Monday': 5}).epsilon:.2f}")  # whatever stopped it
        1.00
        >>> print(plans.statement().splitlines()[1])
        Each example is in one part and pays there alone; ...

    ### Formal Guarantees
    Neighbouring data sets differ by one example of one part, as the plans say. Everything that all
    runs and their releases publish is (ε, δ)-differentially private with the largest ε of a plan at
    their common δ, provided that no example is in two parts, that what a part reads of the data of
    another one is only what that one's plan covers, and that the numbers of examples of the parts
    are public. A person with examples in several parts pays in each of them.
    """

    plans: Mapping[str, PrivacyPlan]

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", dict(self.plans))
        if not self.plans:
            raise ValueError("Expected a plan for each part of the data, got none.")
        for name, plan in self.plans.items():
            if not isinstance(plan, PrivacyPlan) or plan.noise_multiplier is None:
                raise ValueError(f"Expected a calibrated plan for part {name!r}, got {plan!r}.")
        _refuse_repeated(self.plans)
        _refuse_different(self.plans)

    def spent(self, steps: Mapping[str, int] | None = None) -> PrivacyBudget:
        """The largest ε of a part, at the common δ, for numbers of steps chosen beforehand.

        Args:
            steps: How many steps were taken of each part's plan, chosen without looking at its run
                unless it has `stopping="any time"`; parts that are not named have not begun, and
                have released nothing. By default all steps of all parts.

        Raises:
            ValueError: A part that has no plan, or more steps than its plan has.
        """
        return self._largest([self.plans[n].spent(taken) for n, taken in self._of_parts(steps)])

    def guaranteed(self, steps: Mapping[str, int] | None = None) -> PrivacyBudget:
        """The largest ε of a part, at the common δ, whatever made the runs of the parts end.

        Args:
            steps: How many steps were taken of each part's plan; else as `spent`.

        Raises:
            ValueError: As `spent`.
        """
        each = self._of_parts(steps)
        return self._largest([self.plans[name].guaranteed(taken) for name, taken in each])

    def statement(self, steps: Mapping[str, int] | None = None) -> str:
        """What all parts guarantee together, then the statement of the part that costs most.

        Args:
            steps: As `spent`.
        """
        parts = [(n, taken, self.plans[n].guaranteed(taken)) for n, taken in self._of_parts(steps)]
        if not parts:
            return "No part of the data was trained on yet: nothing is spent."
        name, taken, most = max(parts, key=lambda part: part[2].epsilon)
        plan = self.plans[name]
        own = plan.statement(taken if taken < plan.sampling.steps else None)
        if most.delta == 1:
            return own
        together = sum(budget.epsilon for _, _, budget in parts)
        largest = f"epsilon={rounded_up(most.epsilon, 4)} at delta={rounded_up(most.delta, 3)}"
        return "\n".join(
            [
                f"Training on {len(parts)} disjoint parts of the data protects one example with "
                f"{largest}: the largest of the parts' epsilons, that of {name}.",
                *self._if_fixed(steps, most),
                "Each example is in one part and pays there alone; that no example is in two parts "
                "is assumed.",
                f"A person with an example in every part pays in each: together at most epsilon="
                f"{rounded_up(together, 4)} at delta={rounded_up(len(parts) * most.delta, 3)}.",
                f"Of {name}:",
                own,
            ]
        )

    def _if_fixed(self, steps: Mapping[str, int] | None, most: PrivacyBudget) -> list[str]:
        """A line where less is spent if no run's number of steps followed from the run."""
        spent = self.spent(steps)
        if spent.epsilon >= most.epsilon:
            return []
        return [
            f"It is epsilon={rounded_up(spent.epsilon, 4)} if the numbers of steps were chosen "
            "without looking at the runs; else all steps of each plan that has begun count."
        ]

    def _largest(self, budgets: Iterable[PrivacyBudget]) -> PrivacyBudget:
        delta = next(iter(self.plans.values())).budget.delta
        return max(budgets, key=lambda budget: budget.epsilon, default=PrivacyBudget(1e-12, delta))

    def _of_parts(self, steps: Mapping[str, int] | None) -> list[tuple[str, int]]:
        """Each part that has begun, and its steps."""
        if steps is None:
            steps = {name: plan.sampling.steps for name, plan in self.plans.items()}
        unknown = sorted(set(steps) - set(self.plans))
        if unknown:
            raise ValueError(f"Expected steps of the parts {list(self.plans)}, got {unknown}.")
        return [(name, steps[name]) for name in self.plans if name in steps]


def _refuse_repeated(plans: Mapping[str, PrivacyPlan]) -> None:
    """One plan pays for one run, and one draw of batches is of one part's examples."""
    for what in ("plan_id", "draw_id"):
        names: Counter[str] = Counter()
        for plan in plans.values():
            found = getattr(plan if what == "plan_id" else plan.sampling, what, None)
            names.update([found] if found else [])
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(
                f"Expected a {'plan' if what == 'plan_id' else 'draw'} of its own for each part, "
                f"got {what}={twice[0]} twice: calibrate one for each, on examples of its own."
            )


def _refuse_different(plans: Mapping[str, PrivacyPlan]) -> None:
    deltas = {plan.budget.delta for plan in plans.values()}
    if len(deltas) > 1:
        raise ValueError(
            f"Expected one delta for all parts, got {sorted(deltas)}: the largest epsilon is that "
            "of all only at one delta."
        )
    relations = {plan.sampling.neighbouring for plan in plans.values()}
    if len(relations) > 1:
        raise ValueError(
            f"Expected one neighbouring relation for all parts, got {sorted(relations)}: use one "
            "kind of sampling."
        )
