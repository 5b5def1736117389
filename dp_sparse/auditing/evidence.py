"""What a step's released value of a coordinate says of its canary: a log-likelihood ratio.

With σ the noise in units of C, x a released value times B/C, and q the probability that the batch
has a canary that is in: log(1 − q + q·e^((2x − 1)/(2σ²))). Of rows that DP-AdaFEST chooses, whether
the row survived counts, too: q's term is multiplied by the ratio of both probabilities. Ratios add
up over steps, and their sum is the best test (Neyman and Pearson).
"""

import dataclasses

import numpy as np
from scipy import stats

from dp_sparse.optimizers import DPAdaFESTOptimizer, PrivateOptimizer


@dataclasses.dataclass(frozen=True)
class Survival:
    """How likely a row survives.

    Attributes:
        looked_up: If one canary looks it up.
        untouched: If nobody does.
    """

    looked_up: float
    untouched: float

    @classmethod
    def of(cls, optimizer: PrivateOptimizer, rows: int) -> "Survival | None":
        """Of a probe table of so many rows, the optimizer's last; None if no row is chosen."""
        if not isinstance(optimizer, DPAdaFESTOptimizer) or not optimizer.tables:
            return None
        sizes = [table.shape[0] for table in optimizer.tables]
        untouched = optimizer.false_rows_per_step[sizes.index(rows)] / rows
        clip = optimizer.contribution_clip_norm
        lifted = min(1.0, clip) / (optimizer.contribution_noise_multiplier * clip)
        return cls(float(stats.norm.sf(stats.norm.isf(untouched) - lifted)), untouched)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The ratio of one step.

    Attributes:
        sampling_probability: q.
        noise_multiplier: σ of the gradients.
        survival: Of rows that are chosen.
    """

    sampling_probability: float
    noise_multiplier: float
    survival: Survival | None = None

    def of(self, values: np.ndarray) -> np.ndarray:
        """The ratio of each coordinate, float64.

        Args:
            values: x, float64; exactly 0 for a row that did not survive.
        """
        ratio = (2 * values - 1) / (2 * self.noise_multiplier**2)
        if self.survival is not None:
            seen, alone = self.survival.looked_up, self.survival.untouched
            survived = np.log(seen) - np.log(alone) + ratio
            ratio = np.where(values != 0, survived, np.log1p(-seen) - np.log1p(-alone))
        q = self.sampling_probability
        if q == 1:
            return ratio
        return np.logaddexp(np.log1p(-q), np.log(q) + ratio)
