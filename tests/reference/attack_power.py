"""The best test of one distribution against another, by sorting outcomes: Neyman and Pearson.

Distributions are given by the mass of each outcome; a density on a fine grid is one.
"""

import numpy as np


def trade_off(null: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The rates `[outcomes + 1, 2]` of false and true positives of all likelihood ratio tests.

    Args:
        null: float64 `[outcomes]`, > 0: masses where an accusation is wrong.
        other: float64 `[outcomes]`: masses where it is right.
    """
    order = np.argsort(-other / null, kind="stable")  # the most suspicious outcome first
    masses = np.stack([null[order], other[order]], axis=1)
    return np.concatenate([np.zeros([1, 2]), np.cumsum(masses, axis=0)])


def true_positive_rate(first: np.ndarray, second: np.ndarray, rate: float) -> float:
    """The least concave curve above both tests, of `second` and of `first`, at a rate.

    That is what a privacy curve of both directions can say: the highest chord over the rate.
    """
    points = np.concatenate([trade_off(first, second), trade_off(second, first)])
    left, right = points[points[:, 0] <= rate], points[points[:, 0] > rate]
    best = 0.0
    for x, y in left:
        share = (rate - x) / (right[:, 0] - x)
        best = max(best, float(np.max(y + share * (right[:, 1] - y))))
    return best
