"""What no noise can meet, said before a search for it."""

import math
import warnings
from collections.abc import Callable, Sequence

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.calibration import COARSE, LIMITS
from dp_sparse.accounting.releases import Release
from dp_sparse.sampling import Sampling


def signal_to_noise(sampling: Sampling, noise_multiplier: float) -> float:
    """√T·B/σ: what all steps together move along one direction, over their noise along it.

    If every example's clipped gradient points there. No run has more.
    """
    return math.sqrt(sampling.steps) * sampling.expected_batch_size / noise_multiplier


def warn_if_hopeless(budget: PrivacyBudget, sampling: Sampling, noise_multiplier: float) -> None:
    """Warns if all steps together move less than their noise, even along a single direction.

    The signal to noise hardly depends on batch size and steps: it is N times what ε and δ allow an
    example to move, so below 1 nothing but more examples or a larger budget helps.
    """
    signal = signal_to_noise(sampling, noise_multiplier)
    if signal < 1:
        warnings.warn(
            f"No training can learn from num_examples={sampling.num_examples} at "
            f"epsilon={budget.epsilon:g} and delta={budget.delta:g}: with "
            f"noise_multiplier={noise_multiplier:.4g} the noise of all steps is {1 / signal:.3g} "
            "times what all examples together can move. More examples or a larger budget help; "
            "dp_sparse.plan_table compares batch sizes and epochs.",
            stacklevel=3,
        )


def refuse_infeasible(
    epsilon: Callable[[float, float], float],
    budget: PrivacyBudget,
    sampling: Sampling,
    releases: Sequence[Release],
) -> None:
    """Raises ValueError if even the most noise spends more than the budget.

    Warns if a part of the budget is out of reach, since batches beyond the capacity take all of δ.

    Args:
        epsilon: Of a noise multiplier and an interval, for all steps and releases together.
        budget: What they may spend.
        sampling: Of the steps.
        releases: What is released beside them.
    """
    if math.isinf(budget.epsilon):
        raise ValueError(
            "Expected a plan with an epsilon, got one of not_private_plan, which needs no "
            "calibration: calibrate the one that it is made of."
        )
    if sampling.overflow_delta(0.0, sampling.steps) >= budget.delta:
        raise ValueError(
            f"Batches beyond capacity={sampling.batch_capacity} alone exceed "
            f"delta={budget.delta:g} at every epsilon. Raise sampling.capacity."
        )
    if sampling.overflow_delta(budget.epsilon, sampling.steps) >= budget.delta:
        warnings.warn(
            f"Batches beyond capacity={sampling.batch_capacity} alone exceed "
            f"delta={budget.delta:g} at epsilon={budget.epsilon:g}, so the plan gets the noise of "
            "a smaller epsilon. Raise sampling.capacity to use all of it.",
            stacklevel=4,
        )
    if not epsilon(LIMITS[1], COARSE) <= budget.epsilon:
        names = [release.name for release in releases]
        raise ValueError(
            f"No noise meets the budget: even noise_multiplier={LIMITS[1]:g} spends "
            f"more than epsilon={budget.epsilon:g} at delta={budget.delta:g}. Raise the "
            f"budget{f', or lower the cost of {names}' if names else ''}."
        )
