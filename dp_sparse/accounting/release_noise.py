"""The noise with which a release, together with training, costs a given share of epsilon.

Composed with training, a release costs a fraction of what it would cost on its own: privacy losses
add up like independent random variables, and that of training is much larger. So there is one
budget ε: training alone is calibrated to (1 − share)·ε, and the release gets the smallest noise for
which both together meet ε. One evaluation takes about 0.5 s, after 1 s for training.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable

import dp_accounting

from dp_sparse.accounting.accountant import Accountant, epsilon_of
from dp_sparse.accounting.calibration import smallest_meeting
from dp_sparse.accounting.plan import PrivacyPlan
from dp_sparse.accounting.run_cost import RunCost
from dp_sparse.accounting.statement import rounded_up

EventOfNoise = Callable[[float], dp_accounting.DpEvent]

_INTERVAL = 1e-4  # of the privacy loss, if ε is at most 1
_DIGITS = 6
_NOISE_LIMITS = (0.1, 1e9)  # in counts, or deviations over the sensitivity


def release_noise(plan: PrivacyPlan, release: EventOfNoise, share: float) -> float:
    """The smallest noise of a release that, with training, meets the plan's budget.

    Training and the plan's other releases alone are calibrated to (1 − share)·ε. The noise is
    about 1e-4 of itself above the smallest.

    Args:
        plan: A plan without the release, calibrated or not.
        release: The event of the release at a noise.
        share: The part of ε for the release, in (0, 1).

    Raises:
        ValueError: Batches beyond the capacity take all of δ, or no noise meets the budget.
    """
    budget = plan.for_all_steps
    training = _training_cost(plan, (1 - share) * budget.epsilon)
    delta = budget.delta - training.failure_delta(budget.epsilon)
    if delta <= 0:
        raise ValueError(
            f"Batches beyond capacity={plan.sampling.batch_capacity} alone exceed "
            f"delta={budget.delta:g} at epsilon={budget.epsilon:g}, which leaves nothing for a "
            "release. Raise sampling.capacity, or lower epsilon."
        )
    return smallest_joint_noise(training.event, release, epsilon=budget.epsilon, delta=delta)


def _training_cost(plan: PrivacyPlan, epsilon: float) -> RunCost:
    """What the plan's releases and training cost together, with the noise for `epsilon`."""
    smaller = dataclasses.replace(plan, budget=dataclasses.replace(plan.budget, epsilon=epsilon))
    with warnings.catch_warnings():  # the plan that trains warns by itself where nothing is learnt
        warnings.simplefilter("ignore")
        sigma = smaller.calibrate().noise_multiplier
    assert sigma is not None
    return plan.cost(sigma, plan.sampling.steps)


def smallest_joint_noise(
    training: dp_accounting.DpEvent, release: EventOfNoise, *, epsilon: float, delta: float
) -> float:
    """The smallest noise for which `training` and `release(noise)` together are (ε, δ)-DP.

    Raises:
        ValueError: None is.
    """
    interval = _INTERVAL * max(1.0, epsilon)
    spent = _accountant(training, interval).distribution

    def together(noise: float) -> float:
        return _accountant(release(noise), interval).add(spent).get_epsilon(delta)

    return _smallest(together, epsilon)


def smallest_noise(release: EventOfNoise, *, epsilon: float, delta: float) -> float:
    """The smallest noise for which `release(noise)` on its own is (ε, δ)-DP.

    Raises:
        ValueError: None is.
    """
    interval = 10 * _INTERVAL * epsilon
    return _smallest(lambda noise: epsilon_of(release(noise), delta, interval), epsilon)


def _smallest(epsilon: Callable[[float], float], budget: float) -> float:
    """The smallest noise whose ε is at most `budget`, to about 1e-4 of itself above it.

    In six digits, rounded up, so that it is the same on processors whose last bits differ.
    """
    found = smallest_meeting(epsilon, budget, 100.0, limits=_NOISE_LIMITS, relative=True)
    if math.isinf(found):
        raise ValueError(
            f"No noise up to {_NOISE_LIMITS[1]:g} meets the budget: raise share or epsilon."
        )
    return float(rounded_up(found, _DIGITS))


def _accountant(event: dp_accounting.DpEvent, interval: float) -> Accountant:
    accountant = Accountant(value_discretization_interval=interval)
    accountant.compose(event)
    return accountant
