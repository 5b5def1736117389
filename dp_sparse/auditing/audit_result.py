"""What an audit found, in words and as a picture."""

import dataclasses
import os
from pathlib import Path

import numpy as np

from dp_sparse.accounting import PrivacyPlan, beside
from dp_sparse.auditing.scores import CanaryScores
from dp_sparse.core import require_matplotlib, whole_file

_RATES = np.geomspace(1e-4, 1, 60)


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
