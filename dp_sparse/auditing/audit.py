"""An audit of a plan on a model: canaries in, a lower bound on ε out.

Two runs, each with its own plan, canaries and coins: the first one chooses attacks and thresholds,
the second one is judged. Costs twice what training costs, and reads the weights of the probe after
each step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import BudgetAccount, PrivacyPlan
from dp_sparse.auditing.audit_result import AuditResult, Bound
from dp_sparse.auditing.canaries import Attacks, Canaries, GradientCanaries, Trained
from dp_sparse.auditing.estimators import (
    best_threshold,
    one_run_bound,
    one_run_fdp_bound,
    repeated_runs_bound,
)
from dp_sparse.auditing.placement import Placement
from dp_sparse.auditing.scores import CanaryScores
from dp_sparse.auditing.trade_offs import GaussianTradeOff, PlanTradeOff, TradeOff
from dp_sparse.core import validate
from dp_sparse.optimizers import PrivateOptimizer


@dataclasses.dataclass(frozen=True)
class Audit:
    """Trains with canaries as a user does, and says what ε is at least.

    Attributes:
        model: Makes the model, anew for each run.
        examples: `(x, y)` or `(x, y, sample_weight)` arrays, as many as the plan has.
        loss: As `compile` takes it.
        plan: The calibrated plan that is audited, with Poisson sampling or a stream.
        optimizer: From a plan to the private optimizer.
        canaries: `GradientCanaries(...)`, or `InputCanaries(...)`.
        confidence: That none of the bounds is too high.
        account: Where each of the two runs is charged before it begins.

    Raises:
        ValueError: An argument out of its range or of another kind.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        >>> sampling = dp_sparse.StreamSampling(num_examples=64, batch_size=32)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).calibrate()
        >>> audit = dp_sparse.Audit(
        ...     model=lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]),
        ...     examples=(x, x[:, :1]), loss="mse", plan=plan,
        ...     optimizer=lambda plan: dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0),
        ...     canaries=dp_sparse.GradientCanaries(count=64))
        >>> result = audit.run()
        >>> result.bound > result.claim, result.exceeds
        (False, False)

    ### Formal Guarantees
    If the plan's claim holds, `exceeds` is true with probability at most `1 − confidence`. Where a
    bound needs more than that, its name says so. Each of the two runs is a private run of its own
    on the examples, with the plan's noise, so its ε adds to every other run's. The audited copies
    are never saved, exported or returned. The canaries' scores are, and so is what follows from
    them; with `InputCanaries` those are protected as examples are.
    """

    model: Callable[[], keras.Model]
    examples: Any
    loss: Any
    plan: PrivacyPlan
    optimizer: Callable[[PrivacyPlan], PrivateOptimizer]
    canaries: Canaries = dataclasses.field(default_factory=GradientCanaries)
    confidence: float = 0.999
    account: BudgetAccount | None = None

    def __post_init__(self) -> None:
        validate.probability("confidence", self.confidence)
        if not isinstance(self.canaries, Canaries):
            raise ValueError(
                "Expected canaries=GradientCanaries(...) or InputCanaries(...), got "
                f"canaries={self.canaries!r}."
            )
        for name in ("model", "optimizer"):
            if not callable(getattr(self, name)):
                raise ValueError(
                    f"Expected {name} to be a function that makes one, got "
                    f"{name}={getattr(self, name)!r}."
                )
        PlanTradeOff(self.plan)  # refuses what claims nothing
        self._trained()

    def run(self) -> AuditResult:
        """Trains both runs, and judges the second one."""
        placement, trained = Placement.of(self.plan.sampling, self.canaries.number), self._trained()
        runs: list[Attacks] = []
        spent = np.zeros(2)
        for purpose in ("thresholds", "judged"):
            plan = self._plan_of(placement)
            if self.account is not None:
                self.account.charge(plan, note=f"audit: {purpose}")
            runs.append(self.canaries.attacked(trained, placement, plan))
            spent += plan.budget.epsilon, plan.budget.delta
        bounds = self._judged(*runs)
        best = max(bounds, key=lambda bound: bound.epsilon)
        scores = runs[1][best.attack]
        return AuditResult(self.plan, bounds, self.confidence, scores, (spent[0], spent[1]))

    def _judged(self, pilot: Attacks, judged: Attacks) -> tuple[Bound, ...]:
        """The bounds of one run, by the attacks and at the thresholds that were best on another."""
        estimators = dict(_ESTIMATORS)
        if not self.canaries.independent:
            del estimators[_INDEPENDENT]
        confidence = 1 - (1 - self.confidence) / len(estimators)
        claim, rough = PlanTradeOff(self.plan), GaussianTradeOff(1.0, self.plan.budget.delta)
        found = []
        for name, estimator in estimators.items():
            on_pilot = functools.partial(estimator, claim=rough, confidence=confidence)
            at = {attack: best_threshold(scores, on_pilot) for attack, scores in pilot.items()}
            attack = max(at, key=lambda each: on_pilot(pilot[each], at[each]))
            bound = estimator(judged[attack], at[attack], claim=claim, confidence=confidence)
            found.append(Bound(bound, name, attack, at[attack]))
        return tuple(found)

    def _plan_of(self, placement: Placement) -> PrivacyPlan:
        """A plan for one run of the audit, with the same noise."""
        plan = self.plan
        assert plan.noise_multiplier is not None
        return PrivacyPlan(
            plan.budget, placement.sampling, plan.mechanism, plan.releases
        ).with_noise(plan.noise_multiplier)

    def _trained(self) -> Trained:
        examples = tuple(self.examples) if isinstance(self.examples, list | tuple) else ()
        if len(examples) not in (2, 3):
            raise ValueError(
                "Expected examples=(x, y) or (x, y, sample_weight) of arrays, got "
                f"{type(self.examples).__name__}."
            )
        x, y = examples[:2]
        count = len(tf.nest.flatten(y)[0])
        if count != self.plan.sampling.num_examples:
            raise ValueError(
                f"Expected num_examples={self.plan.sampling.num_examples} examples, as the plan "
                f"has, got {count}."
            )
        weight = examples[2] if len(examples) == 3 else np.ones(count)
        weight = np.asarray(weight, np.float32)
        return Trained(self.model, x, y, weight, self.loss, self.optimizer)


def _one_run(scores: CanaryScores, threshold: float, claim: TradeOff, confidence: float) -> float:
    return one_run_bound(scores, threshold, claim.delta, confidence)


_INDEPENDENT = "the plan's trade-off, if canaries are independent"
_ESTIMATORS: dict[str, Callable[..., float]] = {
    "whatever the mechanism": _one_run,
    "the plan's trade-off": one_run_fdp_bound,
    _INDEPENDENT: repeated_runs_bound,
}
