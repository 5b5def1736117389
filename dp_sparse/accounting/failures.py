"""ε of a run that may fail: batches beyond their capacity, and noise that ends too early."""

import math
from collections.abc import Callable

import dp_accounting

from dp_sparse.accounting.accountant import epsilon_of
from dp_sparse.accounting.budget import PrivacyBudget

_ROUNDS = 5


def epsilon_beside_failures(
    event: dp_accounting.DpEvent,
    budget: PrivacyBudget,
    failure_delta: Callable[[float], float],
    interval: float,
) -> float:
    """ε of `event` at the budget's δ less what failures take of it; infinity if there is none.

    Args:
        event: What is released.
        budget: Its δ; and its ε, at which the search begins. An answer below it need not be exact.
        failure_delta: What failures take of δ at an ε. It grows with ε, so ε is raised until the
            two agree.
        interval: The grid of the privacy loss distributions.
    """
    taken, epsilon = 0.0, budget.epsilon
    for attempt in range(_ROUNDS):
        needed = failure_delta(epsilon)
        if needed >= budget.delta:
            return math.inf
        if needed <= taken and attempt > 0:
            return epsilon
        taken = needed
        epsilon = epsilon_of(event, budget.delta - taken, interval)
        if epsilon <= budget.epsilon:
            return epsilon
    return math.inf
