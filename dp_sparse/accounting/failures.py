"""ε of a run that may fail: batches beyond their capacity, and noise that ends too early."""

import math
from collections.abc import Callable

import dp_accounting

from dp_sparse.accounting.accountant import epsilon_of
from dp_sparse.accounting.budget import PrivacyBudget

_ROUNDS = 20
_ABOVE = 1e-6  # beyond what is needed, a part, so that the next round agrees


def epsilon_beside_failures(
    event: dp_accounting.DpEvent,
    budget: PrivacyBudget,
    failure_delta: Callable[[float], float],
    interval: float,
) -> float:
    """ε of `event` at the budget's δ less what failures take of it; infinity if there is none.

    Args:
        event: What is released.
        budget: Its δ; and its ε, which is tried first. An answer below it need not be exact.
        failure_delta: What failures take of δ at an ε. It grows with ε, so ε is raised from what
            it is without failures until the two agree.
        interval: The grid of the privacy loss distributions.
    """
    needed = failure_delta(budget.epsilon)
    if needed < budget.delta:
        epsilon = epsilon_of(event, budget.delta - needed, interval)
        if epsilon <= budget.epsilon:
            return epsilon
    if failure_delta(0.0) >= budget.delta:  # at every ε
        return math.inf
    epsilon = epsilon_of(event, budget.delta, interval)
    for _ in range(_ROUNDS):
        needed = failure_delta(epsilon)
        if needed >= budget.delta:
            return math.inf
        beside = epsilon_of(event, budget.delta - needed, interval)
        if beside <= epsilon:
            return epsilon
        epsilon = beside * (1 + _ABOVE)
    return math.inf
