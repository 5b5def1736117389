"""The highest true-positive rate of a membership test, from a curve δ(ε).

A membership test sees everything released and decides whether an example was in the data. Its
false-positive rate is the probability that it says yes for an example that was not. Its
true-positive rate is the probability that it says yes for one that was. O(points of the curve).
"""

import numpy as np

from dp_sparse.accounting.privacy_loss import LARGEST, UNIT

EPSILONS = np.concatenate(
    [[0.0], np.geomspace(1e-4, LARGEST, 1023)]
)  # at which curves are evaluated


def true_positive_rate(
    epsilons: np.ndarray, deltas: np.ndarray, false_positive_rate: float
) -> float:
    """The highest true-positive rate of any membership test at a false-positive rate, rounded up.

    The minimum over the curve of `e^ε·FPR + δ` and of `1 − e^−ε·(1 − FPR − δ)`, at most 1. On
    `EPSILONS` it is above the bound of the whole curve by less than 10⁻³.

    Args:
        epsilons: float64 `[points]`, each >= 0.
        deltas: float64 `[points]`, each at or above the true δ at its ε.
        false_positive_rate: FPR in (0, 1).

    ### Formal Guarantees
    Let (ε, δ)-differential privacy hold at each point, in both directions between two neighbouring
    datasets. A test says yes for a set of releases. Privacy of that set gives TPR ≤ e^ε·FPR + δ,
    and privacy of its complement gives 1 − FPR ≤ e^ε·(1 − TPR) + δ (Wasserman and Zhou 2010,
    Theorem 2.4; Kairouz, Oh and Viswanath 2015, Theorem 2.1). Each point gives a bound, so their
    minimum is a bound, for any points. With all ε ≥ 0 it is the symmetric trade-off function of
    this δ(ε): for a pair with this curve in both directions no bound is smaller (Dong, Roth and Su
    2022, section 2). The bound holds for every test, also for a randomised one and for one that
    knows all other examples, and whichever of the two datasets is the true one.
    """
    ahead = np.exp(epsilons) * false_positive_rate + deltas
    reverse = -np.expm1(-epsilons) + np.exp(-epsilons) * (false_positive_rate + deltas)
    rounding = 1 + 16 * UNIT  # terms are positive, so errors are relative
    return min(float(np.min(np.minimum(ahead, reverse))) * rounding, 1.0)


def of_a_group(
    epsilons: np.ndarray, deltas: np.ndarray, false_positive_rate: float, examples: int
) -> float:
    """The highest true-positive rate of a test for a group of examples: all are in, or none is.

    Args:
        epsilons: As in `true_positive_rate`.
        deltas: As in `true_positive_rate`, of one example.
        false_positive_rate: FPR in (0, 1).
        examples: k >= 1.

    ### Formal Guarantees
    From the dataset without the group to the one with it there are k neighbours in a row. Let T(x)
    bound the rate at which any test says yes on a dataset, if it says yes at the rate x on a
    neighbour. T does not fall with x, so T applied k times bounds it at the end of the row (Dong,
    Roth and Su 2022, Theorem 2.14). For a Gaussian mechanism that is exact, up to the grid: σ
    becomes σ/k.
    """
    rate = false_positive_rate
    for _ in range(examples):
        if rate >= 1:
            break
        rate = true_positive_rate(epsilons, deltas, rate)
    return rate
