"""The noise with which a selection, together with training, costs a given share of epsilon.

Composed with training, a selection costs a fraction of what it would cost on its own: privacy
losses add up like independent random variables, and that of training is much larger. So there is
one budget ε: training alone is calibrated to (1 − share)·ε, and the selection gets the smallest
noise for which both together meet ε. One evaluation takes about 0.5 s, after 1 s for training.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping

import dp_accounting

from dp_sparse.accounting import Accountant, PrivacyPlan, RunCost, epsilon_of, smallest_meeting
from dp_sparse.core import validate
from dp_sparse.selection.top_k.counting import TopKTable, as_tables
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    NoiseSource,
)
from dp_sparse.selection.top_k.select import allocate_rows

_INTERVAL = 1e-4  # of the privacy loss, if ε is at most 1
_NOISY = (GaussianTopK, GumbelTopK, LaplaceTopK)
_NOISE_LIMITS = (0.1, 1e9)  # in counts, or deviations over the sensitivity


@dataclasses.dataclass(frozen=True)
class CalibratedTopK:
    """A noise source for a selection that costs a given share of a plan's epsilon.

    Attributes:
        source: The noise source to select with. Its noise is the smallest that, composed with
            training, meets the budget.
        apart: The noise source that a selection would need if it were not composed with training
            and cost share·ε on its own.
        share: The part of ε that training does not use.
        lookups: p, the most counts of one example, for which the noise was calibrated.
    """

    source: NoiseSource
    apart: NoiseSource
    share: float
    lookups: int

    def __str__(self) -> str:
        joint, apart = (source.scale_of(self.lookups) for source in (self.source, self.apart))
        return (
            f"{self.share:.3g} of epsilon buys {self.source.description(self.lookups)}, composed "
            f"with training; apart from it, {apart / joint:.3g} times as much "
            f"({self.apart.description(self.lookups)})"
        )


def calibrate_top_k(
    plan: PrivacyPlan,
    tables: Mapping[str, int | TopKTable],
    k: int,
    source_class: type[GaussianTopK | GumbelTopK | LaplaceTopK] = GaussianTopK,
    *,
    weights: Mapping[str, float] | None = None,
    share: float = 0.01,
) -> CalibratedTopK:
    """The smallest noise of a selection that, with training, meets the plan's budget.

    Training and the plan's other releases alone are calibrated to (1 − share)·ε. The noise is at
    most 1e-4 of itself above the smallest.

    Args:
        plan: A plan without the selection, calibrated or not.
        tables: As `select_top_k`.
        k: As `select_top_k`.
        source_class: The class of the noise source: `GaussianTopK`, `GumbelTopK` or `LaplaceTopK`.
        weights: As `select_top_k`.
        share: The part of ε for the selection, in (0, 1).

    Raises:
        ValueError: An argument is out of its range, nothing would be counted, batches beyond the
            capacity take all of δ, or no noise meets the budget.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=800, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.1, 1e-3), sampling)
        >>> noise = dp_sparse.calibrate_top_k(plan, {"users": 10}, k=4, share=0.1)
        >>> print(noise)
        0.1 of epsilon buys Gaussian noise of standard deviation 44... on each count, composed with
        training; apart from it, 2.1... times as much (Gaussian noise of standard deviation 93...)
    """
    if source_class not in _NOISY:
        raise ValueError(
            f"Expected source_class among {[kind.__name__ for kind in _NOISY]}, the class itself, "
            f"got source_class={source_class!r}."
        )
    wanted = allocate_rows(k, as_tables(tables), weights)
    if not wanted.selected:
        raise ValueError(
            f"Expected k to leave out rows of some table, got k={k}: every table is kept whole or "
            "left out, which costs nothing. Select with any noise source."
        )
    share, budget = validate.probability("share", share), plan.for_all_steps

    def selection(noise: float) -> dp_accounting.DpEvent:
        return source_class(noise).event(wanted.lookups, wanted.selected)

    training = _training_cost(plan, (1 - share) * budget.epsilon)
    delta = budget.delta - training.failure_delta(budget.epsilon)
    if delta <= 0:
        raise ValueError(
            f"Batches beyond capacity={plan.sampling.batch_capacity} alone exceed "
            f"delta={budget.delta:g} at epsilon={budget.epsilon:g}, which leaves nothing for a "
            "selection. Raise sampling.capacity, or lower epsilon."
        )
    joint = smallest_joint_noise(training.event, selection, epsilon=budget.epsilon, delta=delta)
    apart = smallest_noise(selection, epsilon=share * budget.epsilon, delta=budget.delta)
    return CalibratedTopK(source_class(joint), source_class(apart), share, wanted.lookups)


def _training_cost(plan: PrivacyPlan, epsilon: float) -> RunCost:
    """What the plan's releases and training cost together, with the noise for `epsilon`."""
    smaller = dataclasses.replace(plan, budget=dataclasses.replace(plan.budget, epsilon=epsilon))
    with warnings.catch_warnings():  # the plan that trains warns by itself where nothing is learnt
        warnings.simplefilter("ignore")
        sigma = smaller.calibrate().noise_multiplier
    assert sigma is not None
    return plan.cost(sigma, plan.sampling.steps)


def smallest_joint_noise(
    training: dp_accounting.DpEvent,
    selection: Callable[[float], dp_accounting.DpEvent],
    *,
    epsilon: float,
    delta: float,
) -> float:
    """The smallest noise for which `training` and `selection(noise)` together are (ε, δ)-DP.

    Raises:
        ValueError: None is.
    """
    interval = _INTERVAL * max(1.0, epsilon)
    spent = _accountant(training, interval).distribution

    def together(noise: float) -> float:
        return _accountant(selection(noise), interval).add(spent).get_epsilon(delta)

    return _smallest(together, epsilon)


def smallest_noise(
    selection: Callable[[float], dp_accounting.DpEvent], *, epsilon: float, delta: float
) -> float:
    """The smallest noise for which `selection(noise)` on its own is (ε, δ)-DP.

    Raises:
        ValueError: None is.
    """
    interval = 10 * _INTERVAL * epsilon
    return _smallest(lambda noise: epsilon_of(selection(noise), delta, interval), epsilon)


def _smallest(epsilon: Callable[[float], float], budget: float) -> float:
    """The smallest noise whose ε is at most `budget`, to at most 1e-4 of itself above it."""
    found = smallest_meeting(epsilon, budget, 100.0, limits=_NOISE_LIMITS, relative=True)
    if math.isinf(found):
        raise ValueError(
            f"No noise up to {_NOISE_LIMITS[1]:g} meets the budget: raise share or epsilon."
        )
    return found


def _accountant(event: dp_accounting.DpEvent, interval: float) -> Accountant:
    accountant = Accountant(value_discretization_interval=interval)
    accountant.compose(event)
    return accountant
