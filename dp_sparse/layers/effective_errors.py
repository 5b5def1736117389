"""Effective errors: how much of each weight is noise, from what a plan makes public.

Source: "Delving into Differentially Private Transformer" (Ding et al., ICML 2024), definition 4.1
and claim 4.2: a step adds noise of deviation σ·C/B to every entry of the mean gradient. A weight of
the network gets a gradient from every example; the row of token i from the fraction p_i of them
that contain it, so its noise weighs 1/p_i as much. O(tokens), once.
"""

import dataclasses

import numpy as np

from dp_sparse.accounting import PrivacyPlan, Release
from dp_sparse.core import PrivacyError, validate
from dp_sparse.selection import RowFrequencies


@dataclasses.dataclass(frozen=True, eq=False)
class EffectiveErrors:
    """Variances of the noise in weights, in units of the mean gradient.

    Attributes:
        weight_variance: (σ·C/B)², of every entry of a layer that all examples use.
        token_variances: float32 `[tokens]`: (σ·C/(B·p_i))², of every entry of a token's row.
        release: What a plan must pay for them; None if they follow from public numbers.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> errors = dp_sparse.layers.EffectiveErrors(1e-6, np.ones(10, np.float32))
        >>> errors.token_variances.shape
        (10,)
    """

    weight_variance: float
    token_variances: np.ndarray
    release: Release | None = None

    def __post_init__(self) -> None:
        variances = np.array(self.token_variances, np.float32)
        good = variances.ndim == 1 and np.isfinite(variances).all() and (variances >= 0).all()
        if not good:
            raise ValueError(
                f"Expected token_variances finite, >= 0, of shape [tokens], got {variances!r}."
            )
        if not validate.is_weight(self.weight_variance):
            raise ValueError(
                f"Expected a finite weight_variance >= 0, got weight_variance="
                f"{self.weight_variance!r}."
            )
        variances.setflags(write=False)
        object.__setattr__(self, "token_variances", variances)
        object.__setattr__(self, "weight_variance", float(self.weight_variance))


def effective_errors(
    plan: PrivacyPlan, clip_norm: float, frequencies: RowFrequencies
) -> EffectiveErrors:
    """The effective errors of a training run.

    Args:
        plan: A calibrated plan, with the release of `frequencies` if they came from private data.
        clip_norm: C of the optimizer.
        frequencies: The fraction of examples that contain each token.

    Raises:
        ValueError: The plan has no noise multiplier, or `clip_norm` is out of its range.
        PrivacyError: The plan does not pay for the frequencies.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=800, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling)
        >>> plan = plan.with_noise(4.0)
        >>> known = dp_sparse.RowFrequencies.public("tokens", [0.5, 0.05])
        >>> errors = dp_sparse.layers.effective_errors(plan, clip_norm=1.0, frequencies=known)
        >>> print(f"{errors.weight_variance:.1e}", errors.token_variances)
        1.0e-04 [0.0004 0.04 ]

    ### Formal Guarantees
    All arguments are public, or released at a cost that the plan pays. The errors keep that
    release, and a model that has them trains under no plan without it.
    """
    if plan.noise_multiplier is None:
        raise ValueError("Expected a calibrated plan, got noise_multiplier=None: use calibrate().")
    if frequencies.costs and frequencies.release not in plan.releases:
        raise PrivacyError(
            f"Expected a plan that pays for {frequencies.release.name!r}, got releases="
            f"{[release.name for release in plan.releases]}: use "
            "PrivacyPlan(..., releases=(frequencies.release,)) before calibrate()."
        )
    clip_norm = validate.clip_norm("clip_norm", clip_norm)
    deviation = plan.noise_multiplier * clip_norm / plan.sampling.expected_batch_size
    release = frequencies.release if frequencies.costs else None
    of_tokens = np.square(deviation / frequencies.values)
    return EffectiveErrors(deviation**2, of_tokens, release)
