"""The privacy plan: budget, sampling, mechanism and other releases in one frozen object.

`calibrate` finds the smallest noise multiplier that meets the budget; `spent`, `guaranteed` and
`statement` say what a run of a given length costs. All costs come from privacy loss distributions
(interval 1e-4), rounded up. One evaluation takes 0.3 to 1 s for any number of steps.

A plan can be written as JSON, and read again.
"""

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from dp_sparse.accounting.accountant import epsilon_of
from dp_sparse.accounting.budget import (
    ANY_TIME,
    FIXED,
    RULES,
    PrivacyBudget,
    epsilon_at_any_time,
    of_all_steps,
)
from dp_sparse.accounting.calibration import (
    FINE,
    refuse_infeasible,
    rough_noise_multiplier,
    smallest_noise_multiplier,
    warn_if_hopeless,
)
from dp_sparse.accounting.forecast import Forecast, forecast, forecast_of_noised_rows
from dp_sparse.accounting.mechanisms import (
    LEAST_WINDOWS,
    NOISE_RATIO,
    GaussianMechanism,
    Mechanism,
    Release,
    ReleasePrice,
    checked_releases,
    checked_window,
    longest_window,
    place_of,
)
from dp_sparse.accounting.run_cost import RunCost
from dp_sparse.accounting.statement import (
    EPSILONS,
    FORMATS,
    GROUP,
    NO_PRIVACY,
    RATES,
    Statement,
    of_a_group,
)
from dp_sparse.core import fingerprint, validate
from dp_sparse.sampling import Sampling

_GAUSSIAN = GaussianMechanism()
_FIELDS = (  # of a plan, with their types and what to use
    ("budget", PrivacyBudget, "budget=PrivacyBudget(epsilon, delta)"),
    ("sampling", Sampling, "sampling=PoissonSampling(...) or StreamSampling(...)"),
    ("mechanism", Mechanism, "a mechanism, GaussianMechanism() or ExponentialSelection(...)"),
)


def identified(plan: Any, sampling: Sampling, noise_multiplier: float) -> Any:
    """The plan with a new name, and a sampler that serves it."""
    new = dataclasses.replace(
        plan,
        sampling=sampling.for_plan(None),
        noise_multiplier=noise_multiplier,
        plan_id=secrets.token_hex(16),
    )
    return dataclasses.replace(new, sampling=new.sampling.for_plan(new.fingerprint))


def described(plan: Any) -> dict[str, Any]:
    """The fields of a `PrivacyPlan`, from which `fields_of` makes them again.

    The default of `stopping` is left out, so plans that were saved before it have their names.
    """
    return {
        "budget": dataclasses.asdict(plan.budget),
        "sampling": plan.sampling.get_config(),
        "mechanism": plan.mechanism.get_config(),
        "releases": [release.get_config() for release in plan.releases],
        "noise_multiplier": plan.noise_multiplier,
        "plan_id": plan.plan_id,
        **({} if plan.stopping == FIXED else {"stopping": plan.stopping}),
    }


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `PrivacyPlan` that were described."""
    return {
        "budget": PrivacyBudget(**config["budget"]),
        "sampling": Sampling.from_config(config["sampling"]),
        "mechanism": Mechanism.from_config(config["mechanism"]),
        "releases": tuple(map(Release.from_config, config["releases"])),
        "noise_multiplier": config["noise_multiplier"],
        "plan_id": config["plan_id"],
        "stopping": config.get("stopping", FIXED),
    }


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """What one training run guarantees, and the noise that it needs for that.

    Attributes:
        budget: The (ε, δ) of the whole run.
        sampling: How batches are drawn; it has the amplification and the neighbouring relation.
        mechanism: What one step releases.
        releases: Everything else released from the same data; set before `calibrate`.
        noise_multiplier: The combined σ of the Gaussian releases of a step, set by `calibrate`.
        plan_id: The name of this calibration; one plan pays for one training run (`run_id`).
        stopping: "fixed", or "any time" for a run that may stop early because of what it saw, such
            as with `EarlyStopping`, and whose ε is to be that of the steps it took. It spends half
            of δ on runs of all steps T, a quarter on runs of at most T/2, and so on: ε of all steps
            is some 3 to 5 % larger at the same noise.

    Examples:
        >>> import dp_sparse
        >>> plan = dp_sparse.PrivacyPlan(
        ...     dp_sparse.PrivacyBudget(epsilon=1.0, delta=1e-5),
        ...     dp_sparse.PoissonSampling(num_examples=10_000, expected_batch_size=1000, steps=10),
        ... ).calibrate()
        >>> print(f"{plan.noise_multiplier:.2f}, {plan.spent(steps=5).epsilon:.2f}")
        1.74, 0.78
        >>> print(f"{plan.attack_power(false_positive_rate=0.01):.1%}")  # true positives, at most
        1.8%
        >>> print(plan.statement())
        Guarantee
          (1, 1e-05)-differential privacy protects one example over at most 10 steps; ...

    ### Formal Guarantees
    The outputs of at most `sampling.steps` steps on batches of `sampling.batches(...)`, together
    with `releases`, are (ε, δ)-differentially private under `sampling.neighbouring`. The number of
    examples and every field here are public. δ includes the probabilities that a batch exceeds its
    capacity and that noise ends too early (`mechanisms.beyond_reach`). That holds whatever stops
    the run. That a shorter run has a smaller ε, `spent(steps)`, is proved only if `steps` was
    chosen without looking at the run, or with `stopping="any time"` (`accounting.budget`).
    """

    budget: PrivacyBudget
    sampling: Sampling
    mechanism: Mechanism = _GAUSSIAN
    releases: tuple[Release, ...] = ()
    noise_multiplier: float | None = None
    plan_id: str | None = None
    stopping: str = FIXED

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", checked_releases(self.releases))
        for name, kind, use in _FIELDS:
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"Expected {use}, got {name}={getattr(self, name)!r}.")
        if self.stopping not in RULES:
            raise ValueError(f"Expected stopping in {RULES}, got stopping={self.stopping!r}.")
        if self.sampling.not_private_seed is not None:
            object.__setattr__(self, "budget", PrivacyBudget(math.inf, 1.0))
        elif math.isinf(self.budget.epsilon):
            raise ValueError(f"Expected a finite epsilon, got {self.budget}.")
        if self.noise_multiplier is not None:
            sigma = validate.positive("noise_multiplier", self.noise_multiplier)
            object.__setattr__(self, "noise_multiplier", sigma)

    def calibrate(self) -> "PrivacyPlan":
        """Returns a new plan with the smallest noise multiplier that meets the budget.

        It is at most 1e-4 above the smallest. Warns if no training can learn at that noise.

        Raises:
            ValueError: No noise multiplier meets the budget, because batches beyond the capacity or
                the releases alone exceed it.
        """
        sigma = smallest_noise_multiplier(self._epsilon_of_all_steps(), self.budget.epsilon)
        warn_if_hopeless(self.budget, self.sampling, sigma)
        return identified(self, self.sampling, sigma)

    def with_noise(self, noise_multiplier: float) -> "PrivacyPlan":
        """Returns a new plan that trains with this noise; its budget is what all steps then spend.

        Args:
            noise_multiplier: σ > 0, chosen without looking at the data.

        Raises:
            ValueError: No ε meets the budget's δ with this noise.
        """
        plan = identified(self, self.sampling, noise_multiplier)
        return dataclasses.replace(plan, budget=plan.spent(self.sampling.steps))

    def rough_noise(self) -> tuple[float, float]:
        """A noise multiplier that meets the budget, some 1e-3 above the smallest, and its ε.

        Several times faster than `calibrate`: losses are on a grid ten times coarser, rounded up.

        Raises:
            ValueError: As `calibrate`.
        """
        return rough_noise_multiplier(self._epsilon_of_all_steps(), self.budget.epsilon)

    def spent(self, steps: int) -> PrivacyBudget:
        """The (ε, δ) after `steps` steps, a number chosen without looking at the run.

        With `stopping="any time"` the number may depend on the run. Every release counts from the
        start. ε is rounded up by the most that the accountant's arithmetic may have lost. It is
        (∞, 1) for a plan of `not_private_plan`.

        Args:
            steps: Between 0 and `sampling.steps`.

        Raises:
            ValueError: A number of steps out of its range, a plan that is not calibrated, or one
                with too little noise for any ε.
        """
        sigma = self._noise_for(steps)
        if self.sampling.not_private_seed is not None:
            return self.budget
        epsilon = self._epsilon(sigma, steps) if steps or self.releases else 0.0
        if epsilon == math.inf:
            raise ValueError(
                f"Expected noise that meets delta={self.budget.delta:g} at some epsilon, got "
                f"noise_multiplier={sigma:g}: use plan.calibrate(), or to debug with so little "
                "noise dp_sparse.not_private_plan(plan, seed).with_noise(...)."
            )
        return PrivacyBudget(max(epsilon, 1e-12), self.budget.delta)

    def guaranteed(self, steps: int) -> PrivacyBudget:
        """The (ε, δ) of a run that ended after `steps` steps, whatever made it end there.

        With `stopping="fixed"` it is that of all steps, unless nothing was released; otherwise it
        is `spent(steps)`.

        Args:
            steps: As `spent`.

        Raises:
            ValueError: As `spent`.
        """
        return self.spent(self._counted(steps) if self.stopping == FIXED else steps)

    @property
    def for_all_steps(self) -> PrivacyBudget:
        """What all steps and releases may spend: the budget, or ε and its share of δ."""
        return of_all_steps(self.budget, self.stopping)

    def attack_power(
        self, false_positive_rate: float, steps: int | None = None, *, examples: int = 1
    ) -> float:
        """The highest true-positive rate that any membership test can have, in (0, 1].

        It holds for `steps` steps (default: all) and every release together, and comes from the
        same privacy loss distribution and failures as ε. It is the part of the plan's examples that
        the best attacker recognises, who wrongly suspects the part `false_positive_rate` of other
        examples. Rounded up; 1 if there is no bound.

        A run that stopped early because of what it saw has the bound of all steps. So has every
        run under `stopping="any time"`, since a test may wait for the lengths that suit it.

        Args:
            false_positive_rate: In (0, 1): the probability that an example which was not in the
                data is taken for one that was.
            steps: Between 0 and `sampling.steps`, chosen without looking at the run.
            examples: How many examples the test asks for at once: all of one person, who is in the
                data with all of them or none.

        Raises:
            ValueError: An argument out of its range, or a plan that is not calibrated.

        ### Formal Guarantees
        What it bounds is in `statement.true_positive_rate` and `statement.of_a_group`.
        """
        rate = validate.probability("false_positive_rate", false_positive_rate)
        steps = self.sampling.steps if steps is None else steps
        sigma = self._noise_for(steps)
        counted = self._counted(steps) if self.stopping == ANY_TIME else steps
        deltas = self.cost(sigma, counted).deltas(EPSILONS)
        examples = validate.positive_integer("examples", examples)
        return of_a_group(EPSILONS, deltas, rate, examples)

    def statement(self, steps: int | None = None, *, format: str = "text") -> str:
        """What a run guarantees, to whom, and under which assumptions.

        Five headings with short lines: Guarantee, Against an attacker, Not covered, Assumptions,
        Mechanism. A claim that is not guaranteed stands above them.

        Args:
            steps: How many were taken. By default the statement is that of the plan, which holds
                for every run under it, and says nothing of steps that were taken.
            format: "text", or "json" for the same as data, for model cards and audits.

        Raises:
            ValueError: Another format, "json" for a plan without privacy, or more steps than the
                plan has.
        """
        if format not in FORMATS:
            raise ValueError(f"Expected format in {FORMATS}, got {format!r}.")
        taken = self.sampling.steps if steps is None else steps
        sigma, counted = self._noise_for(taken), self._counted(taken)
        if self.sampling.not_private_seed is not None:
            if format == "json":
                raise ValueError("Expected a plan with privacy, got one of not_private_plan.")
            return NO_PRIVACY.format(self.sampling.not_private_seed)
        guaranteed = self.guaranteed(taken)  # refuses noise that is too small for any curve
        deltas = self.cost(sigma, counted).deltas(EPSILONS)
        rates = [of_a_group(EPSILONS, deltas, rate, n) for n in (1, GROUP) for rate in RATES]
        made = Statement(
            guaranteed=guaranteed,
            if_fixed=self.spent(taken) if taken < counted and self.stopping == FIXED else None,
            any_time=self.stopping == ANY_TIME,
            budget=self.budget,
            steps=steps,
            sampling=self.sampling,
            mechanism=self.mechanism.description(sigma),
            noise_multiplier=sigma,
            releases=[str(self.price(release)) for release in self.releases],
            true_positive_rates=rates,
            not_guaranteed=self.mechanism.not_guaranteed,
        )
        return made.json() if format == "json" else made.text()

    def explain(
        self,
        tables: Mapping[str, Any],
        *,
        lookups: int | None = None,
        contribution_clip_norm: float = 1.0,
        noise_ratio: float = NOISE_RATIO,
        threshold: float | None = None,
        expected_false_rows: float | None = None,
        false_positive_rate: float | None = None,
        rows_per_step: float | None = None,
        window: int = 1,
        noised_rows: float | None = None,
    ) -> Forecast:
        """What `DPAdaFESTOptimizer` would do under this plan; print it before training.

        It uses the plan's whole σ, as with `FlatClipping`; `QuantileClipping` leaves a little less.

        Args:
            tables: For each table its number of rows, `(rows, lookups of an example)`, or float
                `[rows]`: the probability that an example looks the row up, from public data or with
                noise. Without probabilities Zipf's law of exponent 1.1 is assumed, and the print
                says so. For DP-AdaFEST+ the same, for the selected rows alone.
            lookups: The most lookups of one example over all tables; by default those of `tables`,
                or one in each. At least the sum of all probabilities.
            contribution_clip_norm: As of `DPAdaFESTOptimizer`.
            noise_ratio: Likewise.
            threshold: Likewise; or give one of the next three, from which it follows.
            expected_false_rows: Likewise, by default 10 and at most half of all rows.
            false_positive_rate: Of one row that no example has, below ½.
            rows_per_step: The wanted size of the gradient.
            window: As of `DPAdaFESTOptimizer`; the forecast is that of its longest window.
            noised_rows: In place of all of these: how many rows are to get noise in a step. The
                forecast has the window and the false rows that train most lookups then, which
                `DPAdaFESTOptimizer(window=..., expected_false_rows=...)` takes. If that hardly
                matters, the window is short.

        Raises:
            ValueError: A plan without noise or of another mechanism than `GaussianMechanism`, an
                argument out of its range, or two ways to choose the threshold.
        """
        if not isinstance(self.mechanism, GaussianMechanism):
            raise ValueError(
                f"Expected a plan with mechanism=GaussianMechanism(), which DPAdaFESTOptimizer "
                f"needs, got mechanism={self.mechanism!r}."
            )
        asked: dict[str, Any] = {
            "noise_multiplier": self._noise_for(self.sampling.steps),
            "expected_batch_size": self.sampling.expected_batch_size,
            "tables": tables,
            "lookups": lookups,
            "contribution_clip_norm": contribution_clip_norm,
            "noise_ratio": noise_ratio,
            "steps_per_round": self.sampling.steps_per_round,
        }
        chosen: dict[str, Any] = {
            "threshold": threshold,
            "expected_false_rows": expected_false_rows,
            "false_positive_rate": false_positive_rate,
            "rows_per_step": rows_per_step,
        }
        of_plan = asked["noise_multiplier"], validate.positive("noise_ratio", noise_ratio)
        if noised_rows is None:
            window = checked_window(window, self.sampling, *of_plan, self.budget.delta)
            return forecast(**asked, **chosen, window=window)
        chosen |= {"window": None if window == 1 else window}
        others = [f"{name}={value!r}" for name, value in chosen.items() if value is not None]
        if others:
            raise ValueError(
                f"Expected noised_rows alone, got {' and '.join(others)} beside it, which follows "
                "from noised_rows: leave one out."
            )
        most = max(1, self.sampling.steps // LEAST_WINDOWS)
        most = longest_window(self.sampling, most, *of_plan, self.budget.delta)
        return forecast_of_noised_rows(noised_rows, most, **asked)

    def price(self, release: Release) -> ReleasePrice:
        """What one of `releases` adds to ε of all steps, and what it would cost on its own.

        Raises:
            ValueError: The plan is not calibrated, or does not have this release.
        """
        if self.sampling.not_private_seed is not None:
            raise ValueError("A plan of not_private_plan has no epsilon, and no prices.")
        index, steps = place_of(release, self.releases), self.sampling.steps
        others = self.releases[:index] + self.releases[index + 1 :]
        without = dataclasses.replace(self, releases=others).spent(steps).epsilon
        joint = self.spent(steps).epsilon - without
        return ReleasePrice(release.name, joint, epsilon_of(release.event, self.budget.delta, FINE))

    def cost(self, noise_multiplier: float, steps: int) -> RunCost:
        """What `steps` steps with this noise and every release cost together."""
        return RunCost(self.sampling, self.mechanism, self.releases, noise_multiplier, steps)

    @property
    def fingerprint(self) -> int:
        """The name of what the plan guarantees: sampling, noise and releases, not the budget."""
        config = {k: v for k, v in self.get_config().items() if k not in ("plan_id", "budget")}
        return fingerprint({**config, "sampling": self.sampling.drawn_by})

    @property
    def run_id(self) -> str:
        """The name of the one run that the plan pays for: its calibration and its guarantee.

        A copy with other sampling, noise or releases is another plan, though it keeps `plan_id`.
        """
        return f"{self.plan_id}-{self.fingerprint:016x}"

    def get_config(self) -> dict[str, Any]:
        """A description for JSON, of which `from_config` makes an equal plan."""
        return described(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PrivacyPlan":
        """The plan that `get_config` described."""
        return cls(**fields_of(config))

    def _epsilon(self, sigma: float, steps: int) -> float:
        """ε of some steps at the budget's δ, by the rule of `stopping`."""

        def of_length(length: int, budget: PrivacyBudget) -> float:
            return self.cost(sigma, length).epsilon(budget)

        if self.stopping == FIXED:
            return of_length(steps, self.budget)
        return epsilon_at_any_time(of_length, self.budget, self.sampling.steps, steps)

    def _epsilon_of_all_steps(self) -> Callable[[float, float], float]:
        """ε of a noise multiplier on a grid of some interval; refuses what no noise can meet."""
        steps, budget = self.sampling.steps, self.for_all_steps

        def epsilon(sigma: float, interval: float) -> float:
            return self.cost(sigma, steps).epsilon(budget, interval)

        refuse_infeasible(epsilon, budget, self.sampling, self.releases)
        return epsilon

    def _counted(self, steps: int) -> int:
        """The steps that count where the number of those taken may follow from the run."""
        return self.sampling.steps if steps or self.releases else 0

    def _noise_for(self, steps: int) -> float:
        """σ, if the plan has one and has at least `steps` steps."""
        if self.noise_multiplier is None:
            raise ValueError("Expected a calibrated plan, got no noise: use plan.calibrate().")
        if not 0 <= steps <= self.sampling.steps:
            raise ValueError(f"Expected 0 <= steps <= {self.sampling.steps}, got steps={steps}.")
        return self.noise_multiplier
