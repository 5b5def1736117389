"""The privacy loss of a Gaussian mechanism on a Poisson sample, as dp-accounting's but faster.

dp-accounting finds the output at which the loss is ε for one ε of its grid after the other; here
all are found at once. A small error of such an output changes δ(ε) by its square alone: it is the
output at which the difference that makes δ(ε) is largest.
"""

import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_pmf import PLDPmf
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss


def loss_of(sigma: float, probability: float, interval: float) -> pld.PrivacyLossDistribution:
    """The losses of the Gaussian mechanism with noise `sigma` on a sample, for add and remove.

    Args:
        sigma: Noise over sensitivity, > 0.
        probability: q in (0, 1], the probability of each example to be in the sample.
        interval: Between two losses of the grid.
    """

    def one(adjacency: AdjacencyType) -> PLDPmf:
        return pld._create_pld_pmf_from_monotone_privacy_loss(
            _GaussianLoss(sigma, sampling_prob=probability, adjacency_type=adjacency),
            value_discretization_interval=interval,
            use_connect_dots=True,
        )

    return pld._pld_for_subsampled_mechanism(one, probability)


class _GaussianLoss(GaussianPrivacyLoss):
    """The loss for add or for remove, with δ of an array of ε at once."""

    def get_delta_for_epsilon(self, epsilons: np.ndarray) -> np.ndarray:
        """δ(ε) = P[output ≤ x] − e^ε·Q[output ≤ x], at the largest x whose loss is at least ε."""
        outputs = self._outputs(epsilons)
        lower = np.exp(epsilons + self.mu_lower_log_cdf(outputs))
        return np.clip(self.mu_upper_cdf(outputs) - lower, 0, 1)

    def _outputs(self, epsilons: np.ndarray) -> np.ndarray:
        """x of each ε: ∞ if the loss is nowhere below ε, −∞ if it nowhere reaches ε."""
        variance = self.standard_deviation**2
        if self.adjacency_type == AdjacencyType.REMOVE:
            return -0.5 - variance * _unsampled(epsilons, self.sampling_prob)
        return 0.5 + variance * _unsampled(-epsilons, self.sampling_prob)


def _unsampled(losses: np.ndarray, probability: float) -> np.ndarray:
    """`log(1 + (e^loss − 1) / q)`, −∞ where that has no logarithm; without overflow.

    For negative losses as `log((1 − q) / q) + log(e^(loss − log(1 − q)) − 1)`: 1 + (e^loss − 1) / q
    has few digits near the loss log(1 − q).
    """
    if probability == 1:
        return losses
    least = math.log1p(-probability)
    with np.errstate(divide="ignore"):
        beyond = np.log(np.expm1(np.maximum(np.minimum(losses, 0) - least, 0)))
        above = np.maximum(losses, 0)
        large = above + np.log1p((probability - 1) * np.exp(-above))
    return np.where(losses > 0, large, beyond + least) - math.log(probability)
