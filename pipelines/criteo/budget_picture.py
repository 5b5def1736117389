"""AUC and log loss against ε: what a click model costs at each budget, in one picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from pipelines.files import whole_file
from pipelines.points import Run

NAME = "criteo_sample_budgets.png"
_GROUP = "sample"
_METHODS = ("DP-SGD", "DP-AdaFEST, λ=10", "DP-FEST, k=3,000")


def at_several_budgets(lines: Sequence[Run]) -> bool:
    """Whether there is something to draw: each method at two budgets or more."""
    return all(len(_by_epsilon(lines, name)) > 1 for name in _METHODS)


def draw(lines: Sequence[Run], folder: Path) -> None:
    """Writes the picture of the sample's runs: means over their seeds."""
    figure, both = plt.subplots(1, 2, figsize=(9, 4))
    stock = [x for x in lines if x["group"] == _GROUP and x["name"] == "no privacy"]
    kinds = (
        (_auc, "AUC on held-out rows", "no privacy"),
        (_log_loss, "calibrated log loss ÷ a constant's", "no privacy, not calibrated"),
    )
    for axes, (measure, label, stock_label) in zip(both, kinds, strict=True):
        for name in _METHODS:
            found = _by_epsilon(lines, name)
            values = [statistics.fmean(map(measure, runs)) for runs in found.values()]
            axes.plot([*found], values, "o-", label=name)
        if stock:
            axes.axhline(measure(stock[0]), color="green", linestyle=":", label=stock_label)
        ticks = [*_by_epsilon(lines, _METHODS[0])]
        axes.set(xscale="log", xlabel="ε", ylabel=label, xticks=ticks)
        axes.set_xticklabels([f"{each:g}" for each in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    with whole_file(folder / NAME) as file:
        figure.savefig(file, format="png", dpi=110)
    plt.close(figure)


def _by_epsilon(lines: Sequence[Run], name: str) -> dict[float, list[Run]]:
    own = [x for x in lines if x["group"] == _GROUP and x["name"] == name]
    return {e: [x for x in own if x["epsilon"] == e] for e in sorted({x["epsilon"] for x in own})}


def _auc(run: Run) -> float:
    return float(run["auc"])


def _log_loss(run: Run) -> float:
    return float(run["calibrated_log_loss"] / run["constant_log_loss"])
