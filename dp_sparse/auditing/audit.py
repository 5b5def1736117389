"""An audit of a plan on a model: canaries in, a lower bound on ε out.

Two runs, each with its own plan, canaries and coins: the first one chooses attacks and thresholds,
the second one is judged. Costs twice what training costs, and reads the weights of the probe after
each step.

An `AuditResult` says what it found, in words and as a picture.

A Python file that describes an audit, for the command line.
"""

import dataclasses
import functools
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.accounting import BudgetAccount, PrivacyPlan, beside
from dp_sparse.auditing.canaries import Attacks, Canaries, GradientCanaries, Placement, Trained
from dp_sparse.auditing.estimators import (
    CanaryScores,
    best_threshold,
    one_run_bound,
    one_run_fdp_bound,
    repeated_runs_bound,
)
from dp_sparse.auditing.trade_offs import GaussianTradeOff, PlanTradeOff, TradeOff
from dp_sparse.core import require_matplotlib, validate, whole_file
from dp_sparse.optimizers import PrivateOptimizer

_RATES = np.geomspace(1e-4, 1, 60)
_INDEPENDENT = "the plan's trade-off, if canaries are independent"


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound on ε.

    Attributes:
        epsilon: ε.
        estimator: How it was found, and what it needs.
        attack: By what canaries were told apart.
        threshold: Of the attack's scores, from another run.
    """

    epsilon: float
    estimator: str
    attack: str
    threshold: float


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """What attacks on canaries show, beside what the plan claims.

    It has neither weights nor a model.

    Attributes:
        plan: The plan that was audited.
        bounds: Lower bounds on ε, which hold together at `confidence`.
        confidence: Of all bounds together.
        scores: Of the run that was judged, by the attack of the largest bound.
        spent: ε and δ that this audit spent on the examples, runs together.
    """

    plan: PrivacyPlan
    bounds: tuple[Bound, ...]
    confidence: float
    scores: CanaryScores
    spent: tuple[float, float]

    @property
    def claim(self) -> float:
        """ε of the plan, after all of its steps."""
        return self.plan.spent(self.plan.sampling.steps).epsilon

    @property
    def bound(self) -> float:
        """The largest of the bounds."""
        return max(each.epsilon for each in self.bounds)

    @property
    def exceeds(self) -> bool:
        """Whether a bound is above the claim: then the claim is wrong, at `confidence`."""
        return self.bound > self.claim

    def __str__(self) -> str:
        delta = self.plan.budget.delta
        verdict = (
            "The claim is wrong: attacks show more than it allows."
            if self.exceeds
            else "No attack showed more than the claim allows. That proves no privacy."
        )
        return "\n".join(
            [
                *self._not_guaranteed(),
                f"Claimed epsilon={self.claim:.4g} at delta={delta:.3g}.",
                f"{self.scores.count} canaries, {len(self.scores.held_in)} of them in the data; "
                f"all bounds together hold at {self.confidence:.4%} confidence.",
                *(
                    f"At least epsilon={b.epsilon:.4g}: {b.estimator} (by {b.attack})."
                    for b in self.bounds
                ),
                verdict,
                f"The runs of this audit spent epsilon={self.spent[0]:.4g}, delta="
                f"{self.spent[1]:.3g} on the examples, beside every other run.",
            ]
        )

    def _not_guaranteed(self) -> list[str]:
        unproven = self.plan.mechanism.not_guaranteed
        return [] if unproven is None else [beside(*unproven, self.plan.budget)]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws true positives over false ones, as seen and as the plan allows at most.

        Args:
            path: A file whose suffix matplotlib knows, such as .png or .svg.

        Raises:
            ImportError: matplotlib is missing; the message names the extra that installs it.
        """
        require_matplotlib("A plot")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4.5), layout="constrained")
        axes = figure.subplots()
        allowed = [self.plan.attack_power(float(rate)) for rate in _RATES[:-1]]
        axes.plot(_RATES[:-1], allowed, label=f"allowed, epsilon = {self.claim:.3g}", color="black")
        axes.plot(*self._seen(), label=f"seen, epsilon >= {self.bound:.3g}")
        axes.plot(_RATES, _RATES, linestyle=":", color="gray", label="guessing")
        axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.1))
        axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
        axes.set_title(f"{self.scores.count} canaries")
        axes.grid(alpha=0.3)
        axes.legend()
        with whole_file(path) as file:
            figure.savefig(file, format=Path(path).suffix[1:] or "png", dpi=120)

    def _seen(self) -> tuple[np.ndarray, np.ndarray]:
        """False-positive rates, and the highest true-positive ones seen there.

        Between two thresholds an attacker may toss a coin, so that canaries of equal scores, such
        as those whose rows never survived, are on a line.
        """
        scores = np.sort(np.concatenate([self.scores.held_in, self.scores.held_out]))
        thresholds = np.concatenate([[np.inf], scores[::-1]])
        rates = [
            np.searchsorted(np.sort(-each), -thresholds, side="right") / len(each)
            for each in (self.scores.held_out, self.scores.held_in)
        ]
        at, last = np.unique(rates[0][::-1], return_index=True)
        highest = rates[1][::-1][last]
        between = np.union1d(at, _RATES)
        return between, np.interp(between, at, highest)


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


_ESTIMATORS: dict[str, Callable[..., float]] = {
    "whatever the mechanism": _one_run,
    "the plan's trade-off": one_run_fdp_bound,
    _INDEPENDENT: repeated_runs_bound,
}


def audit_of(path: str | os.PathLike[str]) -> Audit:
    """What `get_audit()` of a file gives.

    Args:
        path: A Python file, which is run.

    Raises:
        ValueError: There is no such file, or no such function in it, or it gives something else.

    Examples:
        >>> from dp_sparse import auditing
        >>> auditing.audit_of("none.py")
        Traceback (most recent call last):
            ...
        ValueError: Expected a Python file with a function get_audit(), got no file none.py.
    """
    if not Path(path).is_file():
        raise ValueError(f"Expected a Python file with a function get_audit(), got no file {path}.")
    get_audit = runpy.run_path(str(path)).get("get_audit")
    if not callable(get_audit):
        raise ValueError(f"Expected a function get_audit() in {path}, got {get_audit!r}.")
    audit = get_audit()
    if not isinstance(audit, Audit):
        raise ValueError(f"Expected get_audit() of {path} to return a dp_sparse.Audit: {audit!r}.")
    return audit
