"""The noise source with which a selection, together with training, costs a share of epsilon."""

import dataclasses
from collections.abc import Mapping

import dp_accounting

from dp_sparse.accounting import PrivacyPlan, release_noise, smallest_noise
from dp_sparse.core import validate
from dp_sparse.selection.top_k.counting import TopKTable, as_tables
from dp_sparse.selection.top_k.noise_sources import (
    GaussianTopK,
    GumbelTopK,
    LaplaceTopK,
    NoiseSource,
)
from dp_sparse.selection.top_k.select import allocate_rows

_NOISY = (GaussianTopK, GumbelTopK, LaplaceTopK)


@dataclasses.dataclass(frozen=True)
class CalibratedTopK:
    """A noise source for a selection that costs a given share of a plan's epsilon.

    Attributes:
        source: The noise source to select with. Its noise is the smallest that, composed with
            training, meets the budget.
        apart: The noise source that a selection would need if it were not composed with training
            and cost share·ε on its own.
        share: The part of ε that training does not use.
        lookups: p, the most counts of one example, for which the noise was calibrated.
    """

    source: NoiseSource
    apart: NoiseSource
    share: float
    lookups: int

    def __str__(self) -> str:
        joint, apart = (source.scale_of(self.lookups) for source in (self.source, self.apart))
        return (
            f"{self.share:.3g} of epsilon buys {self.source.description(self.lookups)}, composed "
            f"with training; apart from it, {apart / joint:.3g} times as much "
            f"({self.apart.description(self.lookups)})"
        )


def calibrate_top_k(
    plan: PrivacyPlan,
    tables: Mapping[str, int | TopKTable],
    k: int,
    source_class: type[GaussianTopK | GumbelTopK | LaplaceTopK] = GaussianTopK,
    *,
    weights: Mapping[str, float] | None = None,
    share: float = 0.01,
) -> CalibratedTopK:
    """The smallest noise of a selection that, with training, meets the plan's budget.

    Training and the plan's other releases alone are calibrated to (1 − share)·ε. The noise is at
    most 1e-4 of itself above the smallest. It takes some seconds (`accounting.release_noise`).

    Args:
        plan: A plan without the selection, calibrated or not.
        tables: As `select_top_k`.
        k: As `select_top_k`.
        source_class: The class of the noise source: `GaussianTopK`, `GumbelTopK` or `LaplaceTopK`.
        weights: As `select_top_k`.
        share: The part of ε for the selection, in (0, 1).

    Raises:
        ValueError: An argument is out of its range, nothing would be counted, batches beyond the
            capacity take all of δ, or no noise meets the budget.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=800, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.1, 1e-3), sampling)
        >>> noise = dp_sparse.calibrate_top_k(plan, {"users": 10}, k=4, share=0.1)
        >>> print(noise)
        0.1 of epsilon buys Gaussian noise of standard deviation 44... on each count, composed with
        training; apart from it, 2.1... times as much (Gaussian noise of standard deviation 93...)
    """
    if source_class not in _NOISY:
        raise ValueError(
            f"Expected source_class among {[kind.__name__ for kind in _NOISY]}, the class itself, "
            f"got source_class={source_class!r}."
        )
    wanted = allocate_rows(k, as_tables(tables), weights)
    if not wanted.selected:
        raise ValueError(
            f"Expected k to leave out rows of some table, got k={k}: every table is kept whole or "
            "left out, which costs nothing. Select with any noise source."
        )
    share, budget = validate.probability("share", share), plan.for_all_steps

    def selection(noise: float) -> dp_accounting.DpEvent:
        return source_class(noise).event(wanted.lookups, wanted.selected)

    joint = release_noise(plan, selection, share)
    apart = smallest_noise(selection, epsilon=share * budget.epsilon, delta=budget.delta)
    return CalibratedTopK(source_class(joint), source_class(apart), share, wanted.lookups)
