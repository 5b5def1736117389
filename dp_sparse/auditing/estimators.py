"""Lower bounds on ε from canaries that were recognised, and from canaries that were not.

Three estimators, each at a confidence and at a threshold that was chosen on other canaries:

- `repeated_runs_bound`: one canary a run, many runs; Clopper-Pearson intervals of both rates (Nasr
  et al., USENIX Security 2021 and 2023);
- `one_run_bound`: many canaries in one run, each in by a coin, whatever the mechanism (Steinke,
  Nasr and Jagielski, NeurIPS 2023, Theorem 5.2);
- `one_run_fdp_bound`: the same for a family of trade-off functions (Mahloujifar, Melis and
  Chaudhuri 2024, Algorithm 3).

`CanaryScores` are what an attack says of its canaries; they tell how often a threshold is right.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, special, stats

from dp_sparse.auditing.trade_offs import TradeOff
from dp_sparse.core import validate

_LARGEST = 128.0  # ε that are looked at
_TRIED = 24  # thresholds


@dataclasses.dataclass(frozen=True)
class CanaryScores:
    """The scores of canaries that were in the data, and of canaries that were not.

    A higher score speaks for a canary that was in.

    Attributes:
        held_in: float64 `[n]`, of those that were in.
        held_out: float64 `[m]`, of those that were not.

    Raises:
        ValueError: One of the two is empty, no vector, or has values that are no numbers.

    Examples:
        >>> from dp_sparse import auditing
        >>> scores = auditing.CanaryScores(held_in=[2.0, 3.0], held_out=[0.0, 1.0, 2.5])
        >>> scores.positives(threshold=2.0)  # true ones, and false ones
        (2, 1)
    """

    held_in: np.ndarray
    held_out: np.ndarray

    def __post_init__(self) -> None:
        for name in ("held_in", "held_out"):
            values = np.asarray(getattr(self, name), np.float64)
            if values.ndim != 1 or not values.size or np.isnan(values).any():
                raise ValueError(
                    f"Expected {name} to be a vector of one score or more, got shape "
                    f"{values.shape} with {int(np.isnan(values).sum())} that are no numbers."
                )
            object.__setattr__(self, name, values)

    @classmethod
    def of_coins(cls, scores: Any, present: Any) -> "CanaryScores":
        """The scores of canaries, told apart by the coins that decided which were in.

        Args:
            scores: float `[canaries]`.
            present: bool `[canaries]`.

        Raises:
            ValueError: All canaries were in, or none: toss the coins again.
        """
        scores, present = np.asarray(scores), np.asarray(present, bool)
        return cls(scores[present], scores[~present])

    @property
    def count(self) -> int:
        """How many canaries there are."""
        return len(self.held_in) + len(self.held_out)

    def positives(self, threshold: float) -> tuple[int, int]:
        """How many of those that were in, and of those that were not, reach the threshold."""
        return (
            int(np.count_nonzero(self.held_in >= threshold)),
            int(np.count_nonzero(self.held_out >= threshold)),
        )


def clopper_pearson(
    successes: int | np.ndarray, trials: int, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """The exact interval of a probability; each end fails with (1 − confidence)/2 at most.

    Args:
        successes: How often it happened.
        trials: Of how many.
        confidence: In (0, 1).

    Returns:
        The lower and the upper end.

    Examples:
        >>> from dp_sparse import auditing
        >>> low, high = auditing.clopper_pearson(5, 100, confidence=0.95)
        >>> print(f"{low:.4f} {high:.4f}")
        0.0164 0.1128
    """
    side = (1 - validate.probability("confidence", confidence)) / 2
    k = np.asarray(successes)
    low = np.where(k > 0, special.betaincinv(np.maximum(k, 1), trials - k + 1, side), 0.0)
    high = np.where(k < trials, special.betaincinv(k + 1, np.maximum(trials - k, 1), 1 - side), 1.0)
    return low, high


def repeated_runs_bound(
    scores: CanaryScores, threshold: float, claim: TradeOff, confidence: float = 0.99
) -> float:
    """ε that independent runs show, each with one canary that was in or not.

    Args:
        scores: Of the runs.
        threshold: From which score on a canary is taken for one that was in. It must come from
            other runs (`best_threshold`).
        claim: The family in which ε is read off.
        confidence: That the bound holds.

    Returns:
        ε; the family's claim is ruled out if it is above `claim.epsilon(1.0)`.

    Examples:
        >>> import numpy as np
        >>> from dp_sparse import auditing
        >>> rng = np.random.default_rng(0)
        >>> scores = auditing.CanaryScores(rng.normal(2, 1, 1000), rng.normal(0, 1, 1000))  # μ = 2
        >>> claim = auditing.GaussianTradeOff(noise_multiplier=1.0, delta=1e-5)  # μ = 1
        >>> bound = auditing.repeated_runs_bound(scores, 1.0, claim)
        >>> print(f"claimed {claim.epsilon(1.0):.2f}, shown {bound:.2f}")
        claimed 4.38, shown 8.25

    ### Formal Guarantees
    If runs are independent and the mechanism has the family's claim of some scale, the bound is
    above that claim's ε with probability at most `1 − confidence`.
    """
    (low, _), (_, high) = (
        clopper_pearson(found, len(of), confidence)
        for found, of in zip(
            scores.positives(threshold), (scores.held_in, scores.held_out), strict=True
        )
    )
    return claim.lower_bound(lambda scale: float(low) > claim.power(float(high), scale))


def one_run_bound(
    scores: CanaryScores, threshold: float, delta: float, confidence: float = 0.99
) -> float:
    """ε that one run with many canaries shows at δ, whatever the mechanism is.

    Args:
        scores: Of all canaries of the run, each of which was in by a fair coin of its own.
        threshold: As in `repeated_runs_bound`.
        delta: δ >= 0.
        confidence: As in `repeated_runs_bound`.

    Examples:
        >>> import numpy as np
        >>> from dp_sparse import auditing
        >>> scores = auditing.CanaryScores(np.ones(500), np.zeros(500))  # all are recognised
        >>> print(f"{auditing.one_run_bound(scores, 0.5, delta=1e-5, confidence=0.95):.2f}")
        5.09

    ### Formal Guarantees
    If the run is (ε', δ)-private for one example and the canaries are independent examples, the
    bound is above ε' with probability at most `1 − confidence`.
    """
    validate.probability("confidence", confidence)
    correct, wrong = scores.positives(threshold)
    p_value = _p_value_at(scores.count, correct + wrong, correct, delta)
    return _largest_rejected(lambda epsilon: p_value(epsilon) <= 1 - confidence)


def _p_value_at(
    canaries: int, guesses: int, correct: int, delta: float
) -> Callable[[float], float]:
    """How likely so many of the guesses are right, at most, by ε."""

    def p_value(epsilon: float) -> float:
        rate = special.expit(epsilon)
        tail = stats.binom.sf(correct - 1, guesses, rate)
        if not delta or not correct:
            return float(tail)
        lost = np.arange(1, correct + 1)
        more = (stats.binom.sf(correct - lost - 1, guesses, rate) - tail) / lost
        return float(min(1.0, tail + 2 * canaries * delta * max(0.0, more.max())))

    return p_value


def _largest_rejected(rejected: Callable[[float], bool]) -> float:
    """The end of the ε that are ruled out, from 0 on."""
    if not rejected(0.0):
        return 0.0
    high = 1.0
    while rejected(high) and high < _LARGEST:
        high *= 2
    if high >= _LARGEST:
        return _LARGEST
    signed = lambda epsilon: 1.0 if rejected(epsilon) else -1.0  # noqa: E731
    return float(optimize.bisect(signed, 0.0, high, xtol=1e-6))


def one_run_fdp_bound(
    scores: CanaryScores, threshold: float, claim: TradeOff, confidence: float = 0.99
) -> float:
    """ε that one run with many canaries shows, in a family of trade-off functions.

    Args:
        scores: As in `one_run_bound`.
        threshold: As in `repeated_runs_bound`.
        claim: As in `repeated_runs_bound`.
        confidence: As in `repeated_runs_bound`.

    Returns:
        ε; the family's claim is ruled out if it is above `claim.epsilon(1.0)`.

    Examples:
        >>> import numpy as np
        >>> from dp_sparse import auditing
        >>> rng = np.random.default_rng(0)
        >>> scores = auditing.CanaryScores(rng.normal(1, 1, 1000), rng.normal(0, 1, 1000))  # μ = 1
        >>> claim = auditing.GaussianTradeOff(noise_multiplier=1.0, delta=1e-5)
        >>> bound = auditing.one_run_fdp_bound(scores, 1.5, claim)
        >>> print(f"claimed {claim.epsilon(1.0):.2f}, shown {bound:.2f}")
        claimed 4.38, shown 1.43

    ### Formal Guarantees
    That of `one_run_bound`, for the family's claims in place of (ε', δ).
    """
    validate.probability("confidence", confidence)
    correct, wrong = scores.positives(threshold)
    return claim.lower_bound(
        lambda scale: _too_many_correct(
            lambda rate: 1 - claim.power(1 - rate, scale),
            scores.count,
            correct + wrong,
            correct,
            1 - confidence,
        )
    )


def _too_many_correct(
    least: Callable[[float], float], canaries: int, guesses: int, correct: int, significance: float
) -> bool:
    """Whether so many correct guesses are less likely than `significance` under a trade-off.

    Args:
        least: The least probability, if an example is not in, of a set that has this probability
            if it is.
        canaries: In and out.
        guesses: Of them.
        correct: Of the guesses.
        significance: α.
    """
    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        raised = max(wrong, least(right))
        if raised == wrong:
            break  # neither can change any more
        right = min(right + i / (guesses - i) * (raised - wrong), 1.0)
        wrong = raised
    return right + wrong > guesses / canaries


def best_threshold(pilot: CanaryScores, bound: Callable[[CanaryScores, float], float]) -> float:
    """The threshold at which canaries of other runs show the most.

    It says nothing of the runs that are judged. Two dozen thresholds are tried, from one that most
    canaries reach to one that two of them do.

    Args:
        pilot: Scores of runs that are not judged.
        bound: From scores and a threshold to what they show; one of this module.

    Examples:
        >>> import functools
        >>> import numpy as np
        >>> from dp_sparse import auditing
        >>> rng = np.random.default_rng(0)
        >>> pilot = auditing.CanaryScores(rng.normal(3, 1, 1000), rng.normal(0, 1, 1000))
        >>> bound = functools.partial(
        ...     auditing.repeated_runs_bound, claim=auditing.GaussianTradeOff(1.0, 1e-5))
        >>> 0.5 < auditing.best_threshold(pilot, bound) < 2.5
        True
    """
    everything = np.concatenate([pilot.held_in, pilot.held_out])
    parts = np.geomspace(0.9, min(0.5, 2 / len(everything)), _TRIED)
    thresholds = np.unique(np.quantile(everything, 1 - parts))
    shown = [bound(pilot, float(threshold)) for threshold in thresholds]
    return float(thresholds[int(np.argmax(shown))])
