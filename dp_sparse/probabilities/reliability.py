"""The reliability diagram of a noisy histogram."""

from typing import TYPE_CHECKING

from dp_sparse.core import require_matplotlib
from dp_sparse.probabilities.measures import rates
from dp_sparse.probabilities.score_histogram import ScoreHistogram
from dp_sparse.probabilities.score_map import IDENTITY, ScoreMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(histogram: ScoreHistogram, score_map: ScoreMap) -> "Figure":
    """Rates over predictions of each bin, with the standard error of noise, before and after.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that installs it.
    """
    require_matplotlib("A plot")
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6, 5), layout="constrained")
    axes = drawn.subplots()
    for name, each, marker in (("before", IDENTITY, "o"), ("calibrated", score_map, "s")):
        predicted, seen, error, share = rates(histogram, each)
        axes.errorbar(predicted, seen, error, fmt="none", ecolor="gray", elinewidth=0.8, zorder=1)
        axes.scatter(predicted, seen, 10 + 200 * share, marker=marker, label=name, alpha=0.8)
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], linestyle=":", color="black", label="as predicted")
    what = "mean label" if histogram.kind.name == "regression" else "rate of positives"
    axes.set(xlabel="prediction", ylabel=what, xlim=(low, high))
    axes.set_title("noisy histogram of scores: an area is a share of the examples")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn
