"""Rows with the largest sums of noisy histograms, and what training on them pays."""

import dataclasses
from collections.abc import Mapping, Sequence

import dp_accounting
import numpy as np

from dp_sparse.core import PrivacyError, validate
from dp_sparse.selection.top_k.allocation import allocate_rows
from dp_sparse.selection.top_k.counting import as_tables
from dp_sparse.selection.top_k.histograms import NoisyHistogram
from dp_sparse.selection.top_k.noise_sources import NoiseSource
from dp_sparse.selection.top_k.order_statistics import Quantile
from dp_sparse.selection.top_k.selected_rows import SelectedRows


@dataclasses.dataclass(frozen=True)
class HistogramRows(NoiseSource):
    """Rows with the largest sums of noisy histograms.

    Attributes:
        noise_multiplier: That of the histogram which counted the examples that are trained on; None
            if none did, so that training on these examples pays nothing.
        histograms: The names of all that were summed.
    """

    noise_multiplier: float | None
    histograms: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None:
            value = validate.positive("noise_multiplier", self.noise_multiplier)
            object.__setattr__(self, "noise_multiplier", value)
        object.__setattr__(self, "histograms", tuple(self.histograms))

    def scale_of(self, lookups: int) -> float:
        """The standard deviation of one of the histograms; 0 if none is paid for."""
        del lookups
        return 0.0 if self.noise_multiplier is None else self.noise_multiplier

    def quantiles(self, levels: Quantile) -> np.ndarray:
        """Never drawn again: the noise is in the histograms."""
        raise PrivacyError("Expected rows from select_from_histograms, which draws no noise.")

    def event(self, lookups: int, selected: int) -> dp_accounting.DpEvent:
        """That of the own histogram, or none."""
        del lookups, selected
        if self.noise_multiplier is None:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def description(self, lookups: int) -> str:
        """Which histograms, and which of them this plan pays for."""
        del lookups
        summed = f"sum of {len(self.histograms)} noisy histograms"
        if self.noise_multiplier is None:
            return f"{summed} of other examples, whose plans pay for them"
        others = "" if len(self.histograms) == 1 else "; the plans of the others' examples pay"
        return (
            f"{summed}, that of these examples with noise multiplier "
            f"{self.noise_multiplier:.4g}{others}"
        )


def select_from_histograms(
    histograms: Sequence[NoisyHistogram],
    k: int,
    *,
    own: NoisyHistogram | None,
    weights: Mapping[str, float] | None = None,
) -> SelectedRows:
    """Selects `k` rows over all tables by the sums of noisy histograms of disjoint examples.

    Of rows with equal sums the lower ones are selected.

    Args:
        histograms: Of disjoint sets of examples, such as periods of time; at least one.
        k: Rows to select over all tables, >= 0.
        own: That of the histograms which counted the examples that will be trained on; None if none
            of them did. The plan of the training pays for it.
        weights: As `select_top_k`.

    Raises:
        ValueError: No histogram, one twice, other tables, or `own` is none of them.

    Examples:
        >>> import dp_sparse, numpy as np
        >>> days = [
        ...     dp_sparse.histogram_of_counts({"users": np.array(c)}, {"users": 4}, 0.05, data=day)
        ...     for day, c in [("Monday", [9, 0, 5, 0]), ("Tuesday", [0, 9, 5, 0])]
        ... ]
        >>> rows = dp_sparse.select_from_histograms(days, k=1, own=days[1])
        >>> rows.row_ids["users"], rows.costs  # Tuesday's plan has rows.release
        (array([2]), True)

    ### Formal Guarantees
    Post-processing of the histograms. An example of `own` pays for that one, by `release` of the
    result, in the plan of its training; examples of the other histograms pay in the plans of
    theirs, provided no example is in two histograms. If training goes on with rows to which an
    example of its own contributed, and `own` does not say so, nothing pays for it.
    """
    sizes = _same_tables(histograms)
    names = tuple(histogram.histogram_id for histogram in histograms)
    if own is not None and own.histogram_id not in names:
        raise ValueError(
            f"Expected own to be one of the {len(names)} histograms, got that of {own.data}: add "
            "it, or pass own=None if none of them counted the examples to train on."
        )
    wanted = allocate_rows(k, as_tables(sizes), weights)
    selected = {}
    for name, number in wanted.rows.items():
        total = np.sum([histogram.counts[name] for histogram in histograms], axis=0)
        selected[name] = np.sort(np.argsort(-total, kind="stable")[:number])
    noise = None if own is None else own.noise_multiplier
    return SelectedRows(
        selected, wanted.num_rows, HistogramRows(noise, names), histograms[0].lookups
    )


def _same_tables(histograms: Sequence[NoisyHistogram]) -> dict[str, int]:
    if not histograms:
        raise ValueError("Expected at least one histogram to select from, got none.")
    first, ids = histograms[0], [histogram.histogram_id for histogram in histograms]
    for histogram in histograms:
        if ids.count(histogram.histogram_id) > 1:
            raise ValueError(f"Expected each histogram once, got that of {histogram.data} twice.")
        if histogram.num_rows != first.num_rows:
            raise ValueError(
                f"Expected histograms of the same tables, got {first.num_rows} of {first.data} "
                f"and {histogram.num_rows} of {histogram.data}."
            )
    return first.num_rows
