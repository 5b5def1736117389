"""What a curve δ(ε) leaves to an attacker: the true-positive rate of a membership test, at most.

A membership test sees all that was released and says whether an example was in the data. Its
false-positive rate is the chance that it says so of an example that was not, its true-positive rate
the chance that it says so of one that was. O(points of the curve).
"""

import numpy as np

from dp_sparse.accounting.privacy_loss import LARGEST, UNIT

EPSILONS = np.concatenate([[0.0], np.geomspace(1e-4, LARGEST, 1023)])  # where curves are taken


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
    Let (ε, δ)-differential privacy hold at each point, whichever of two neighbouring datasets
    comes first. A test rejects on a set of releases. Of that set privacy says TPR ≤ e^ε·FPR + δ,
    and of its complement 1 − FPR ≤ e^ε·(1 − TPR) + δ (Wasserman and Zhou 2010, Theorem 2.4;
    Kairouz, Oh and Viswanath 2015, Theorem 2.1). Each point gives a bound, so their minimum is one,
    whatever the points. With all ε ≥ 0 it is the symmetric trade-off function that has this δ(ε),
    and no test of a pair that has this curve in both directions is better (Dong, Roth and Su 2022,
    section 2). It holds for every test, also one that knows all other examples and one that is
    randomised, and for either of the two datasets as the one that is wrongly suspected.
    """
    ahead = np.exp(epsilons) * false_positive_rate + deltas
    reverse = -np.expm1(-epsilons) + np.exp(-epsilons) * (false_positive_rate + deltas)
    rounding = 1 + 16 * UNIT  # terms are positive, so their errors stay relative
    return min(float(np.min(np.minimum(ahead, reverse))) * rounding, 1.0)
